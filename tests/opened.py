"""Ports that are opened for a test and closed after it, over a real stream and in process."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from orchestrator.local_port import LocalPort
from orchestrator.stream_port import Locate, StreamPort
from protos.engine_thread import EngineThread, LinkLimits
from protos.session import SessionServer
from protos.worker import Engine

SECRET = "secret"
LIMITS = LinkLimits(outbox=64, connect_s=2.0)


@asynccontextmanager
async def serving(build: Callable[[], Engine], limits: LinkLimits = LIMITS) -> AsyncIterator[str]:
    """A worker's end on loopback; its address."""
    thread = EngineThread(build, limits)
    server = SessionServer(thread, SECRET, limits)
    try:
        yield await server.start("127.0.0.1")
    finally:
        await server.stop()
        assert await asyncio.to_thread(thread.stop)


@asynccontextmanager
async def streamed(
    build: Callable[[], Engine], limits: LinkLimits = LIMITS
) -> AsyncIterator[StreamPort]:
    async with serving(build, limits) as address, asyncio.timeout(10):
        port = StreamPort("toy", at(address), SECRET, limits)
        yield port
        await port.close()


@asynccontextmanager
async def local(
    build: Callable[[], Engine], limits: LinkLimits = LIMITS
) -> AsyncIterator[LocalPort]:
    async with asyncio.timeout(10):
        port = LocalPort("toy", build, limits)
        yield port
        assert await port.stop()


def at(*addresses: str) -> Locate:
    """A locate that gives these addresses in turn, the last one for ever."""
    turns = itertools.chain(addresses, itertools.repeat(addresses[-1]))

    async def locate() -> str:
        return next(turns)

    return locate


async def nowhere() -> str:
    """A locate that never answers."""
    await asyncio.Event().wait()
    return ""
