"""How a service lives: until a signal, a bug or its own end, with its health told to the edge.

Knows no worker and no model, only the parts that run.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager

from orchestrator.runtime import Runtime, RuntimeFailed
from services.errors import ServiceFailed
from services.server import Server

WATCH_S = 0.2


async def until_signal(
    work: Coroutine[object, object, object], say: Callable[[str], object]
) -> signal.Signals | None:
    """Do the work to its end, or cancel it at SIGINT or SIGTERM, which is returned.

    A second signal cancels what the work still does to clean up.
    """
    task = asyncio.current_task()
    assert task is not None, "this runs in a task"
    received: list[signal.Signals] = []

    def handle(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)
    try:
        await work
    except asyncio.CancelledError:
        if not received:
            raise
        say(f"stopped by {received[0].name}")
        return received[0]
    return None


@asynccontextmanager
async def watched(
    server: Server, runtime: Runtime, needed: Collection[frozenset[str]]
) -> AsyncIterator[None]:
    """Keep health true to the workers; a bug in what runs ends the body. Raises ServiceFailed.

    Ready means that a target is connected, and one drafter of every group in `needed`.
    """
    body = asyncio.current_task()
    assert body is not None, "this runs in a task"
    parts = [asyncio.create_task(_watch(server, runtime, needed))]
    parts.append(asyncio.create_task(runtime.failed()))
    bugs: list[BaseException] = []

    def ended(part: asyncio.Task[None]) -> None:
        if not part.cancelled() and (bug := part.exception()) is not None:
            bugs.append(bug)
            body.cancel()

    for part in parts:
        part.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if not bugs or body.uncancel() > 0:  # it was also cancelled from outside
            raise
        what = str(bugs[0]) if isinstance(bugs[0], RuntimeFailed) else repr(bugs[0])
        raise ServiceFailed(f"a bug ended the service: {what}; its log says where") from bugs[0]
    finally:
        for part in parts:
            part.remove_done_callback(ended)
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await server.set_ready(is_ready=False)


async def _watch(server: Server, runtime: Runtime, needed: Collection[frozenset[str]]) -> None:
    while True:
        up = runtime.up
        is_ready = runtime.has_target and all(group & up for group in needed)
        await server.set_ready(is_ready=is_ready)
        await asyncio.sleep(WATCH_S)
