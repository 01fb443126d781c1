"""The workers by role: which are connected, and whether one that says hello may be taken.

All targets, and each worker through all its lives, are of one model: streams go on over them.
"""

from collections.abc import Callable, Sequence
from functools import partial

from orchestrator.events import DrafterLost, DrafterSaid, Event, TargetLost, TargetSaid
from orchestrator.ports import WorkerLost, WorkerPort
from protos.messages import Hello, Message

SAME = ("model_hash", "vocab_hash", "vocab_size", "page_size")


class Link:
    """One worker's port, and the events that what it says becomes.

    `hello` is the worker's first, `trouble` why it is not connected.
    """

    def __init__(
        self,
        port: WorkerPort,
        role: str,
        said: Callable[[float, Message], Event],
        lost: Callable[[float, str], Event],
    ) -> None:
        self.port = port
        self.role = role
        self.said = said
        self.lost = lost
        self.hello: Hello | None = None
        self.is_up = False
        self.trouble = "no answer yet"

    @property
    def name(self) -> str:
        return self.port.name


class Roster:
    """The links to all targets and drafters, by their index."""

    def __init__(self, targets: Sequence[WorkerPort], drafters: Sequence[WorkerPort]) -> None:
        self.targets = [
            Link(port, "target", partial(_target_said, i), partial(_target_lost, i))
            for i, port in enumerate(targets)
        ]
        self.drafters = [
            Link(port, "drafter", partial(_drafter_said, i), partial(_drafter_lost, i))
            for i, port in enumerate(drafters)
        ]
        self.all = [*self.targets, *self.drafters]

    @property
    def model(self) -> Hello | None:
        """The first hello of a target: what every later one must agree with."""
        return next((link.hello for link in self.targets if link.hello is not None), None)

    def greet(self, link: Link, hello: Hello) -> list[Link]:
        """Take a worker that says hello; the drafters that do not fit it, if it sets the model.

        Raises WorkerLost for a worker this service cannot go on with.
        """
        model = self.model
        if cause := self._unfit(link, hello):
            raise WorkerLost(f"{link.name} {cause}")
        link.hello = link.hello or hello
        link.is_up = True
        if model is not None or link.role != "target":
            return []
        foreign = [
            other
            for other in self.drafters
            if other.hello is not None and other.hello.vocab_hash != hello.vocab_hash
        ]
        for other in foreign:
            other.hello = None
        return foreign

    def _unfit(self, link: Link, hello: Hello) -> str:
        """Why a worker cannot be taken; empty if it can."""
        if hello.role != link.role:
            return f"is a {hello.role}, not a {link.role}; start it as what it is configured to be"
        model = self.model
        known = model if link.role == "target" else link.hello
        for name in SAME if known is not None else ():
            is_, was = getattr(hello, name), getattr(known, name)
            if is_ != was:
                return f"now has {name} {is_!r} instead of {was!r}; restart the service for it"
        if model is not None and hello.vocab_hash != model.vocab_hash:
            return "has another tokenizer than the target; take a drafter made for this target"
        return ""


def _target_said(index: int, now: float, message: Message) -> Event:
    return TargetSaid(now, index, message)  # type: ignore[arg-type]


def _target_lost(index: int, now: float, cause: str) -> Event:
    return TargetLost(now, index, cause)


def _drafter_said(index: int, now: float, message: Message) -> Event:
    return DrafterSaid(now, index, message)  # type: ignore[arg-type]


def _drafter_lost(index: int, now: float, cause: str) -> Event:
    return DrafterLost(now, index, cause)
