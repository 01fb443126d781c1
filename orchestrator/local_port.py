"""A worker's port in this process: the same messages, through the codec, to an engine's thread."""

import asyncio
from collections import deque
from collections.abc import Callable

from orchestrator.ports import WorkerLost
from protos.engine_thread import EngineThread, Link, LinkLimits
from protos.frames import LinkEnded, Outbox, check_hello, pack, unpack
from protos.messages import Message
from protos.worker import Engine


class _LocalLink:
    """One link to the engine; every message passes as bytes, both ways."""

    def __init__(self, engine: EngineThread, limits: LinkLimits) -> None:
        self._received: deque[Message] = deque()
        self._outbox = Outbox(limits.outbox)
        self._link: Link = engine.connect(self._outbox.put, self._outbox.close)

    async def greet(self) -> None:
        """Wait for the engine's Hello, which stays the first message. Raises LinkEnded."""
        await self._fill()
        check_hello(self._received[0])

    def send(self, message: Message) -> None:
        try:
            for copy in _through_codec([message]):
                self._link.send(copy)
        except ValueError as error:
            self._link.end(f"a message cannot be sent: {error}")

    async def receive(self) -> Message:
        """The next message. Raises LinkEnded."""
        while not self._received:
            await self._fill()
        return self._received.popleft()

    def close(self) -> None:
        self._link.end("closed by the orchestrator")

    async def _fill(self) -> None:
        self._received.extend(_through_codec(await self._outbox.take()))


class LocalPort:
    """A WorkerPort whose engine runs here, built in its own thread at the first connect.

    A dead engine is built anew at the next connect. `nice` lowers its thread's priority.
    """

    host = "127.0.0.1"

    def __init__(
        self, name: str, build: Callable[[], Engine], limits: LinkLimits, nice: int = 0
    ) -> None:
        self.name = name
        self._build = build
        self._limits = limits
        self._nice = nice
        self._engine: EngineThread | None = None
        self._link: _LocalLink | None = None

    async def start(self) -> None:
        """Until the engine is built. Raises WorkerLost with its reason."""
        if self._engine is None:
            self._engine = EngineThread(self._build, self._limits, self._nice)
        await asyncio.wait([asyncio.wrap_future(self._engine.ready)])
        if (error := self._engine.ready.exception()) is not None:
            raise WorkerLost(f"{self.name} could not be started: {error}") from error

    async def connect(self) -> None:
        """Open the link, again if need be. Raises WorkerLost, also while the engine is built."""
        await self.close()
        if self._engine is None or self._engine.closed:
            self._engine = EngineThread(self._build, self._limits, self._nice)
        link = _LocalLink(self._engine, self._limits)
        try:
            async with asyncio.timeout(self._limits.connect_s):
                await link.greet()
            self._link = link
        except TimeoutError:
            raise WorkerLost(f"{self.name}: no Hello within {self._limits.connect_s} s") from None
        except LinkEnded as error:
            raise WorkerLost(f"{self.name}: {error}") from error
        finally:
            if self._link is None:
                link.close()

    def send(self, message: Message) -> None:
        """Queue a message. One that is too many, or after the end, shows in `receive`."""
        if self._link is not None:
            self._link.send(message)

    async def receive(self) -> Message:
        """The next message, Hello first. Raises WorkerLost."""
        if self._link is None:
            raise WorkerLost(f"{self.name}: not connected")
        try:
            return await self._link.receive()
        except LinkEnded as error:
            raise WorkerLost(f"{self.name}: {error}") from error

    async def close(self) -> None:
        """End the link; the engine is reset and stays. A pending `receive` raises WorkerLost."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    async def stop(self) -> bool:
        """End the engine's thread; False if it still works after `stop_s`."""
        await self.close()
        engine, self._engine = self._engine, None
        return engine is None or await asyncio.to_thread(engine.stop)


def _through_codec(batch: list[Message]) -> list[Message]:
    return [copy for payload in pack(batch) for copy in unpack(payload)]
