"""A stand-in for the orchestrator, and a running edge over it on free ports."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.request import Delta, Finished, FinishReason, Request, Stats, Update
from services.client import Client
from services.config import ServerConfig
from services.server import Server
from services.translate import Served

DONE = Finished(FinishReason.LENGTH, Stats(rounds=1, histogram=(1,)))
ON_FREE_PORTS = ServerConfig(
    grpc="127.0.0.1:0", http="", metrics="", health="127.0.0.1:0", drain_s=2.0
)


class FakeGenerations:
    """Plays the same script for each request; an Event in it is waited for."""

    def __init__(self, *script: Update | asyncio.Event) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.running = 0
        self.is_draining = False
        self.changed = asyncio.Condition()

    async def generate(self, request: Request) -> AsyncGenerator[Update, None]:
        self.requests.append(request)
        await self._count(+1)
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            await self._count(-1)

    async def drain(self, timeout_s: float) -> None:
        self.is_draining = True
        async with self.changed:
            self.changed.notify_all()
        with contextlib.suppress(TimeoutError):
            await self.until_running(0, timeout_s)

    async def until_running(self, count: int, timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: self.running == count)

    async def until_draining(self, timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: self.is_draining)

    async def _count(self, change: int) -> None:
        self.running += change
        async with self.changed:
            self.changed.notify_all()


@asynccontextmanager
async def edge(
    served: Served,
    generations: FakeGenerations,
    config: ServerConfig = ON_FREE_PORTS,
    max_request_s: float = 60.0,
) -> AsyncIterator[tuple[Server, Client]]:
    """A started, ready server and a client of it."""
    server = Server(served, generations, config, max_request_s)
    await server.start()
    await server.set_ready(is_ready=True)
    try:
        async with Client(f"127.0.0.1:{server.port}") as client:
            yield server, client
    finally:
        await server.stop()


def words(served: Served, text: str) -> Delta:
    return Delta(served.tokenizer.encode(text))
