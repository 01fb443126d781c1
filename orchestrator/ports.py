"""What the runtime needs of the outside world, as Protocols."""

from collections.abc import AsyncGenerator
from typing import Protocol

from orchestrator.request import Request, Update
from protos.messages import Message


class WorkerLost(Exception):
    """The link to a worker ended; the message says why."""


class WorkerPort(Protocol):
    """One link to one worker. The first message received is its Hello.

    In process or over a stream, the same messages pass. `send` never blocks: a full outgoing
    queue ends the link. `receive` raises WorkerLost when the link has ended.
    """

    name: str

    async def connect(self) -> None:
        """Open the link; raises WorkerLost if that fails within the configured time."""

    def send(self, message: Message) -> None: ...

    async def receive(self) -> Message: ...

    async def close(self) -> None: ...


class Generations(Protocol):
    """What the edge needs of the orchestrator."""

    def generate(self, request: Request) -> AsyncGenerator[Update, None]:
        """Serve a request. The last update is Finished or Refused; closing the iterator cancels."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait until the running ones have ended."""
