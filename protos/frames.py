"""Messages to the payloads of a stream and back, and the bounded queue in front of it.

A payload is any number of frames, each after its length in four bytes: what waits travels together.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from protos.codec import MAX_FRAME_BYTES, DecodeError, decode, encode
from protos.messages import PROTOCOL, Hello, Message

_LENGTH_BYTES = 4
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES + _LENGTH_BYTES


class LinkEnded(Exception):
    """The link is over; the message says why."""


def pack(batch: Sequence[Message]) -> Iterator[bytes]:
    """As few payloads as the size bound allows. Raises ValueError for a message beyond a frame."""
    parts: list[bytes] = []
    size = 0
    for message in batch:
        frame = encode(message)
        grown = size + _LENGTH_BYTES + len(frame)
        if parts and grown > MAX_PAYLOAD_BYTES:
            yield b"".join(parts)
            parts, grown = [], _LENGTH_BYTES + len(frame)
        parts += (len(frame).to_bytes(_LENGTH_BYTES, "big"), frame)
        size = grown
    if parts:
        yield b"".join(parts)


def unpack(payload: bytes) -> list[Message]:
    """The messages of a payload. Raises DecodeError for anything else."""
    if not payload:
        raise DecodeError("an empty payload")
    batch = []
    start = 0
    while start < len(payload):
        body = start + _LENGTH_BYTES
        end = body + int.from_bytes(payload[start:body], "big")
        if end > len(payload):
            raise DecodeError(f"a frame of {end - body} bytes is cut at {len(payload) - body}")
        batch.append(decode(payload[body:end]))
        start = end
    return batch


def check_hello(first: Message) -> None:
    """Raises LinkEnded unless `first` is a Hello of our protocol."""
    if not isinstance(first, Hello):
        raise LinkEnded(f"the first message is {type(first).__name__}, not Hello")
    if first.protocol != PROTOCOL:
        raise LinkEnded(
            f"it speaks protocol {first.protocol}, this orchestrator {PROTOCOL}: "
            "run the same release on both"
        )


class Outbox:
    """A bounded queue of messages, filled from any thread and emptied by one task.

    A full queue closes itself; `cause` says why it is closed. A closed queue holds nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._filled = asyncio.Event()
        self._over = asyncio.Event()
        self._waiting: deque[Message] = deque()
        self.cause = ""

    def put(self, batch: Iterable[Message]) -> None:
        """Queue messages without waiting; once closed they are dropped."""
        if self.cause:
            return
        self._waiting.extend(batch)
        if len(self._waiting) > self._limit:
            self.close(f"outgoing queue full: more than {self._limit} messages wait")
        self._notify(self._filled)

    def close(self, cause: str) -> None:
        """End the queue; the first cause stays."""
        self.cause = self.cause or cause
        self._waiting.clear()
        self._notify(self._filled)
        self._notify(self._over)

    async def take(self) -> list[Message]:
        """All that waits, at least one message. Raises LinkEnded once closed."""
        while True:
            await self._filled.wait()
            # Cleared before the queue is emptied: what is put meanwhile sets it again.
            self._filled.clear()
            if self.cause:
                self._filled.set()
                raise LinkEnded(self.cause)
            batch: list[Message] = []
            with suppress(IndexError):  # It may be cleared meanwhile.
                while True:
                    batch.append(self._waiting.popleft())
            if batch:
                return batch

    async def pump(self, write: Callable[[bytes], Awaitable[object]]) -> str:
        """Write all that is put until the queue is closed, even while a write waits; the cause.

        Raises what `write` raises.
        """
        writing = asyncio.create_task(self._write(write))
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({writing, over}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            writing.cancel()
            over.cancel()
            await asyncio.gather(writing, over, return_exceptions=True)
        return self.cause

    async def _write(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        try:
            while True:
                for payload in pack(await self.take()):
                    await write(payload)
        except ValueError as error:
            self.close(f"a message cannot be sent: {error}")
        except LinkEnded:
            return

    def _notify(self, event: asyncio.Event) -> None:
        if threading.get_ident() == self._thread:
            event.set()
        elif not event.is_set():
            self._loop.call_soon_threadsafe(event.set)
