"""The real core and real engines on a virtual clock: one thread, every delay and fault chosen.

Whatever happens here is a function of its arguments, so a failing case is its own reproduction.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config import CoreConfig
from orchestrator.core import Core
from orchestrator.events import (
    Cancelled,
    Command,
    DrafterLost,
    DrafterSaid,
    DropDrafter,
    DropTarget,
    Event,
    Round,
    Submitted,
    TargetLost,
    TargetSaid,
    Tell,
    Ticked,
    ToDrafterWorker,
    ToTargetWorker,
    WakeAt,
)
from orchestrator.k_policy import FixedK, KPolicy
from orchestrator.request import Delta, Request, Update
from protos.messages import Advance, Audit, AuditReply, Grow, Message, Open, Step
from protos.worker import Engine
from tests.faults import Plan, calm
from tests.virtual_link import VirtualLink, Weather


class Clock:
    """Virtual time: runs what is due, in order."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self._now

    @property
    def is_idle(self) -> bool:
        return not self._due

    def call_at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(time, self._now), next(self._count), call))

    def step(self) -> bool:
        """Run the next thing; False if there is none."""
        if not self._due:
            return False
        self._now, _, call = heapq.heappop(self._due)
        call()
        return True


@dataclass(slots=True)
class Peer:
    """The core's end of one link: what is heard becomes an event."""

    heard: Callable[[Message], None]
    ended: Callable[[str], None]

    def arrived(self, message: Message) -> None:
        self.heard(message)

    def lost(self, cause: str) -> None:
        self.ended(cause)


@dataclass(slots=True)
class Served:
    """What a client received."""

    tokens: list[int] = field(default_factory=list)
    last: Update | None = None


class World:
    """A core with one target and some drafters; collects what clients get and checks laws."""

    def __init__(
        self,
        config: CoreConfig,
        make_stopper: Callable,
        policy: KPolicy | None = None,
    ) -> None:
        self.clock = Clock()
        self.core = Core(config, policy or FixedK(config.k), make_stopper)
        self.targets: list[VirtualLink] = []
        self.drafters: list[VirtualLink] = []
        self.served: dict[str, Served] = {}
        self.rounds: list[Round] = []
        self.log: list[tuple[Event, list[Command]]] = []
        self.steps: list[Step] = []
        self.engines: dict[str, Any] = {}
        self.audits: dict[str, AuditReply] = {}
        self.proposed: set[tuple[int, tuple[int, ...]]] = set()
        self._told_drafter: dict[tuple[int, int, int], list[int]] = {}
        self._paths: dict[tuple[int, int, int, int], tuple[int, ...]] = {}

    def add_target(
        self, engine: Engine, step_s: Callable[[int], float], plan: Plan = calm
    ) -> VirtualLink:
        """A target whose step takes `step_s(rows)`."""
        index = len(self.targets)

        def duration(message: Message | None, answers: list[Message]) -> float:
            if not isinstance(message, Step):
                return 0.0
            rows = sum(len(e.tokens) + len(e.nodes) for e in message.extends)
            return step_s(rows) if rows else 0.0001

        peer = Peer(
            lambda m: self._heard(f"target {index}", m, TargetSaid(self.clock.now(), index, m)),
            lambda cause: self.dispatch(TargetLost(self.clock.now(), index, cause)),
        )
        self.engines[f"target {index}"] = engine
        link = VirtualLink(engine, self.clock, peer, Weather(plan, duration))
        self.targets.append(link)
        link.connect()
        return link

    def add_drafter(self, engine: Engine, forward_s: float, plan: Plan = calm) -> VirtualLink:
        """A drafter whose forwards take `forward_s`."""
        index = len(self.drafters)

        def heard(message: Message) -> None:
            if isinstance(message, Grow):
                self._note_grow(index, message)
            self._heard(f"drafter {index}", message, DrafterSaid(self.clock.now(), index, message))

        peer = Peer(heard, lambda cause: self.dispatch(DrafterLost(self.clock.now(), index, cause)))
        weather = Weather(plan, lambda message, answers: forward_s if message is None else 0.0)
        self.engines[f"drafter {index}"] = engine
        link = VirtualLink(engine, self.clock, peer, weather)
        self.drafters.append(link)
        link.connect()
        return link

    def at(self, time: float, call: Callable[[], None]) -> None:
        self.clock.call_at(time, call)

    def audit(self) -> dict[str, AuditReply]:
        """Every worker's account, once all is quiet."""
        for link in [*self.targets, *self.drafters]:
            link.send(Audit(1))
        self.settle()
        return self.audits

    def _heard(self, name: str, message: Message, event: Event) -> None:
        if isinstance(message, AuditReply):
            self.audits[name] = message
        else:
            self.dispatch(event)

    def submit(self, request: Request, at: float = 0.0) -> Served:
        served = self.served[request.request_id] = Served()
        self.clock.call_at(at, lambda: self.dispatch(Submitted(self.clock.now(), request)))
        return served

    def cancel(self, request_id: str, at: float) -> None:
        self.clock.call_at(at, lambda: self.dispatch(Cancelled(self.clock.now(), request_id)))

    def dispatch(self, event: Event) -> None:
        commands = self.core.handle(event)
        self.log.append((event, commands))
        for command in commands:
            self._carry_out(command)

    def run(self, until: Callable[[], bool] | None = None, limit: int = 200_000) -> None:
        """Until the condition holds, or until every client has had its last update."""
        finished = until or (lambda: all(s.last is not None for s in self.served.values()))
        for _ in range(limit):
            if finished():
                return
            if not self.clock.step():
                self.dispatch(Ticked(self.clock.now()))
                assert finished() or not self.clock.is_idle, (
                    "everything is idle and nothing is finished"
                )
        raise AssertionError(f"not finished after {limit} events at {self.clock.now():.3f} s")

    def settle(self) -> None:
        """Run until nothing is left to do."""
        while self.clock.step():
            pass

    def _carry_out(self, command: Command) -> None:
        match command:
            case ToTargetWorker(index, message):
                if isinstance(message, Step):
                    self._check_step(message)
                self.targets[index].send(message)
            case ToDrafterWorker(index, message):
                self._note_told(index, message)
                self.drafters[index].send(message)
            case Tell(request_id, update):
                self._tell(self.served[request_id], update)
            case WakeAt(at):
                self.clock.call_at(at, lambda: self.dispatch(Ticked(self.clock.now())))
            case Round():
                self.rounds.append(command)
                self._check_histories(command.seq)
            case DropTarget(_, cause) | DropDrafter(_, cause):
                raise AssertionError(f"a link was dropped: {cause}")

    def _tell(self, served: Served, update: Update) -> None:
        assert served.last is None, "nothing comes after the last update"
        if isinstance(update, Delta):
            assert update.tokens, "a delta has tokens"
            served.tokens.extend(update.tokens)
        else:
            served.last = update

    # Law 2: what is verified was proposed on top of exactly the committed prefix.

    def _note_told(self, index: int, message: Message) -> None:
        if isinstance(message, Open):
            self._told_drafter[index, message.seq, message.opening] = list(message.tokens)
        elif isinstance(message, Advance):
            told = self._told_drafter[index, message.seq, message.opening]
            told[message.start :] = message.tokens

    def _note_grow(self, index: int, grow: Grow) -> None:
        told = self._told_drafter.get((index, grow.seq, grow.opening), [])
        for guess in grow.nodes:
            key = (index, grow.seq, grow.opening)
            below = self._paths.get((*key, guess.parent))
            parent = tuple(told[: grow.frontier]) if guess.parent == 0 else below
            if parent is not None:
                self._paths[(*key, guess.id)] = (*parent, guess.token)
                self.proposed.add((grow.seq, (*parent, guess.token)))

    def _check_histories(self, seq_id: int) -> None:
        """B006: after a commit the target has the same tokens, and drafters a prefix of them."""
        seq = next((s for s in self.core.sequences if s.seq == seq_id), None)
        if seq is None:
            return  # it has just ended
        held = self.engines[f"target {seq.target}"]._sequences.get(seq_id)
        if held is not None:
            assert held.tokens == seq.tokens, "target and orchestrator hold different histories"
        for index in range(len(self.drafters)):
            drafted = self.engines[f"drafter {index}"]._sequences.get(seq_id)
            if drafted is not None:
                assert drafted.tokens == seq.tokens[: len(drafted.tokens)]

    def _check_step(self, step: Step) -> None:
        self.steps.append(step)
        by_id = {seq.seq: seq for seq in self.core.sequences}
        for extend in step.extends:
            seq = by_id[extend.seq]
            if seq.lookup is not None:
                continue  # looked-up guesses are not the drafter's
            paths: list[tuple[int, ...]] = []
            for node in extend.nodes:
                parent = tuple(seq.tokens) if node.parent < 0 else paths[node.parent]
                paths.append((*parent, node.token))
            for path in paths:
                assert (extend.seq, path) in self.proposed, "verified what nobody proposed there"
