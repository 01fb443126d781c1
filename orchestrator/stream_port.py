"""A worker's port over one gRPC stream; the worker is looked up anew at every connect."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import grpc

from orchestrator.ports import WorkerLost
from protos.codec import DecodeError
from protos.engine_thread import LinkLimits
from protos.frames import LinkEnded, Outbox, check_hello, unpack
from protos.messages import Message
from protos.session import METHOD, SECRET_KEY, SERVICE, keepalive

Locate = Callable[[], Awaitable[str]]


class _Stream:
    """One call to one address: what is sent in order, what is received in order."""

    def __init__(self, address: str, secret: str, limits: LinkLimits) -> None:
        # A pool of its own: a shared one would keep the back-off of an earlier connection.
        options = [
            *keepalive(limits),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
        ]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}"
        )
        self._call = method(metadata=((SECRET_KEY, secret),))
        self._received: deque[Message] = deque()
        self.outbox = Outbox(limits.outbox)
        self._writing = asyncio.create_task(self._write())

    async def greet(self) -> None:
        """Wait for the worker's Hello, which stays the first message. Raises LinkEnded."""
        self._received.extend(await self._read())
        check_hello(self._received[0])

    async def receive(self) -> Message:
        """The next message. Raises LinkEnded."""
        while not self._received:
            self._received.extend(await self._read())
        return self._received.popleft()

    async def close(self) -> None:
        """Cancel the call and free the connection."""
        try:
            self.outbox.close("closed by the orchestrator")
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            # Its traceback refers to this stream, whose connection ends with the last reference.
            del self._writing
        finally:
            self._call.cancel()
            await self._channel.close()

    async def _read(self) -> list[Message]:
        try:
            payload = await self._call.read()
            if isinstance(payload, bytes):
                return unpack(payload)
            raise LinkEnded("the worker ended the stream")
        except grpc.aio.AioRpcError as error:
            raise LinkEnded(f"{error.code().name}: {error.details()}") from error
        except DecodeError as error:
            raise LinkEnded(f"bad frame: {error}") from error
        except asyncio.CancelledError:
            # A call that was cancelled here raises the same as a task that was.
            task = asyncio.current_task()
            if not self.outbox.cause or (task is not None and task.cancelling()):
                raise
            raise LinkEnded(self.outbox.cause) from None

    async def _write(self) -> None:
        # The reader hears the same status.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.outbox.pump(self._call.write)
        self._call.cancel()


class StreamPort:
    """A WorkerPort whose worker is elsewhere. `locate` gives its present address, or WorkerLost."""

    def __init__(self, name: str, locate: Locate, secret: str, limits: LinkLimits) -> None:
        self.name = name
        self._locate = locate
        self._secret = secret
        self._limits = limits
        self._stream: _Stream | None = None
        self.host = ""  # where the worker was found last

    async def connect(self) -> None:
        """Open the link, again if need be. Raises WorkerLost."""
        await self.close()
        where = "unknown"
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            try:
                async with asyncio.timeout(self._limits.connect_s):
                    where = await self._locate()
                    self.host = where.rpartition(":")[0]
                    self._stream = _Stream(where, self._secret, self._limits)
                    await self._stream.greet()
            except TimeoutError:
                wait = f"no Hello within {self._limits.connect_s} s"
                raise WorkerLost(f"{self.name} at {where}: {wait}") from None
            except LinkEnded as error:
                raise WorkerLost(f"{self.name} at {where}: {error}") from error
            stack.pop_all()

    def send(self, message: Message) -> None:
        """Queue a message. One that is too many, or after the end, shows in `receive`."""
        if self._stream is not None:
            self._stream.outbox.put((message,))

    async def receive(self) -> Message:
        """The next message, Hello first. Raises WorkerLost."""
        if self._stream is None:
            raise WorkerLost(f"{self.name}: not connected")
        try:
            return await self._stream.receive()
        except LinkEnded as error:
            raise WorkerLost(f"{self.name}: {error}") from error

    async def close(self) -> None:
        """End the link; a pending `receive` raises WorkerLost."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
