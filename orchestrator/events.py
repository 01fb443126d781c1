"""What the core is told and what it answers. Every event carries the time it happened."""

from dataclasses import dataclass

from orchestrator.request import Request, Update
from protos.messages import FromDrafter, FromTarget, ToDrafter, ToTarget


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client asks for a sequence."""

    now: float
    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A client is gone or gave up; of no effect if the request has ended."""

    now: float
    request_id: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed: waits and deadlines are looked at again."""

    now: float


@dataclass(frozen=True, slots=True)
class Draining:
    """Take no new requests from here on."""

    now: float


@dataclass(frozen=True, slots=True)
class TargetSaid:
    now: float
    target: int
    message: FromTarget


@dataclass(frozen=True, slots=True)
class TargetLost:
    now: float
    target: int
    cause: str


@dataclass(frozen=True, slots=True)
class DrafterSaid:
    now: float
    drafter: int
    message: FromDrafter


@dataclass(frozen=True, slots=True)
class DrafterLost:
    now: float
    drafter: int
    cause: str


Event = (
    Submitted | Cancelled | Ticked | Draining | TargetSaid | TargetLost | DrafterSaid | DrafterLost
)


@dataclass(frozen=True, slots=True)
class ToTargetWorker:
    target: int
    message: ToTarget


@dataclass(frozen=True, slots=True)
class ToDrafterWorker:
    drafter: int
    message: ToDrafter


@dataclass(frozen=True, slots=True)
class DropTarget:
    """Close the link: what this worker said makes no sense."""

    target: int
    cause: str


@dataclass(frozen=True, slots=True)
class DropDrafter:
    """Close the link: what this worker said makes no sense."""

    drafter: int
    cause: str


@dataclass(frozen=True, slots=True)
class Tell:
    """An update for the client of one request."""

    request_id: str
    update: Update


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Ticked at this time, or earlier."""

    at: float


@dataclass(frozen=True, slots=True)
class Round:
    """One sequence's selection and its verdict, as it went: the record of the round trace.

    `wanted` is the K asked for, `used` the guesses verified, `clamp` why they differ.
    """

    now: float
    seq: int
    number: int
    frontier: int
    wanted: int
    used: int
    clamp: str
    accepted: int
    committed: tuple[int, ...]
    hit: bool
    sources: tuple[str, ...]


Command = ToTargetWorker | ToDrafterWorker | DropTarget | DropDrafter | Tell | WakeAt | Round
