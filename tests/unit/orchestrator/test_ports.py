"""Both ports keep one contract, over a real stream and in process; links that misbehave too."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

import pytest

from orchestrator.ports import WorkerLost, WorkerPort
from protos.engine_thread import LinkLimits
from protos.messages import PROTOCOL, Audit, AuditReply, Grow, Hello, Message, Open
from protos.sampling import GREEDY
from protos.worker import Engine
from tests.fakes import BROKEN, WRONG, ToyEngine
from tests.opened import local, streamed

LARGE = Open(1, 1, (70000,) * 4_000_000, GREEDY, 1)

both = pytest.mark.parametrize("opened", [streamed, local])
Opened = Callable[..., AbstractAsyncContextManager[WorkerPort]]


@both
async def test_hello_comes_first_and_answers_keep_the_order(opened: Opened) -> None:
    async with opened(ToyEngine) as port:
        await port.connect()
        assert isinstance(await port.receive(), Hello)
        for nonce in range(50):
            port.send(Audit(nonce))
        assert [await port.receive() for _ in range(50)] == [
            AuditReply(nonce, 8, 8, 0) for nonce in range(50)
        ]


@both
async def test_own_work_of_the_engine_arrives(opened: Opened) -> None:
    async with opened(ToyEngine) as port:
        await port.connect()
        await port.receive()
        port.send(Open(1, 1, (5, 6), GREEDY, credit=3))
        grown = [await port.receive() for _ in range(3)]
        assert all(isinstance(message, Grow) for message in grown)


@both
@pytest.mark.parametrize("nonce", [WRONG, BROKEN])
async def test_an_engine_that_raises_is_a_lost_worker_and_can_be_connected_again(
    opened: Opened, nonce: int
) -> None:
    async with opened(ToyEngine) as port:
        await port.connect()
        await port.receive()
        port.send(Audit(nonce))
        with pytest.raises(WorkerLost, match=r"toy: .*planted"):
            await port.receive()
        port.send(Audit(1))
        await port.connect()
        assert isinstance(await port.receive(), Hello)


@both
async def test_another_protocol_is_refused_naming_both(opened: Opened) -> None:
    async with opened(lambda: ToyEngine(protocol=7)) as port:
        with pytest.raises(WorkerLost, match=f"speaks protocol 7, this orchestrator {PROTOCOL}"):
            await port.connect()
        with pytest.raises(WorkerLost, match="not connected"):
            await port.receive()


@both
async def test_closing_wakes_who_waits(opened: Opened) -> None:
    async with opened(ToyEngine) as port:
        await port.connect()
        await port.receive()
        waiting = asyncio.create_task(port.receive())
        await asyncio.sleep(0)
        await port.close()
        with pytest.raises(WorkerLost, match="closed by the orchestrator"):
            await waiting


@both
async def test_who_waits_can_be_cancelled(opened: Opened) -> None:
    async with opened(ToyEngine) as port:
        await port.connect()
        await port.receive()
        waiting = asyncio.create_task(port.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


@both
async def test_a_message_beyond_a_frame_ends_the_link(opened: Opened) -> None:
    async with opened(ToyEngine) as port:
        await port.connect()
        await port.receive()
        port.send(LARGE)
        with pytest.raises(WorkerLost, match=r"cannot be sent: Open of .* bytes exceeds a frame"):
            await port.receive()


@both
async def test_the_engine_is_reset_when_the_link_ends(opened: Opened) -> None:
    engine = ToyEngine()
    async with opened(lambda: engine) as port:
        for turn in range(3):
            await port.connect()
            await port.receive()
            port.send(Open(1, 1, (5,), GREEDY, 0))
            port.send(Audit(turn))
            assert await port.receive() == AuditReply(turn, 8, 7, 0)
        assert engine.resets == 2


@both
async def test_an_engine_that_is_still_being_built_is_not_waited_for_longer(
    opened: Opened,
) -> None:
    built = threading.Event()

    def build() -> Engine:
        built.wait(10)
        return ToyEngine()

    async with opened(build, LinkLimits(connect_s=0.05)) as port:
        with pytest.raises(WorkerLost, match=r"no Hello within 0\.05 s"):
            await port.connect()
        built.set()
        hello: Message | None = None
        while hello is None:
            with suppress(WorkerLost):
                await port.connect()
                hello = await port.receive()
        assert isinstance(hello, Hello)


@both
async def test_an_engine_that_cannot_be_built_is_named(opened: Opened) -> None:
    def build() -> Engine:
        raise ValueError("no such model")

    async with opened(build) as port:
        with pytest.raises(WorkerLost, match="the engine is dead: ValueError: no such model"):
            await port.connect()


async def test_a_dead_local_engine_is_built_anew() -> None:
    attempts = itertools.count()

    def build() -> Engine:
        if next(attempts) == 0:
            raise ValueError("not yet")
        return ToyEngine()

    async with local(build) as port:
        with pytest.raises(WorkerLost, match="not yet"):
            await port.connect()
        await port.connect()
        assert isinstance(await port.receive(), Hello)


class SlowReader(ToyEngine):
    """An engine that is stuck in its first message until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def handle(self, message: Message) -> list[Message]:
        self.go_on.wait(10)
        return super().handle(message)


@both
async def test_a_full_inbox_of_the_engine_ends_the_link(opened: Opened) -> None:
    engine = SlowReader()
    async with opened(lambda: engine, LinkLimits(inbox=2)) as port:
        await port.connect()
        await port.receive()
        for nonce in range(4):
            port.send(Audit(nonce))
        with pytest.raises(WorkerLost, match="inbox full: 2 messages wait"):
            await port.receive()
        engine.go_on.set()
