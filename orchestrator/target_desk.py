"""Sends steps to targets and takes their answers; counts the memory promised on each.

Sequences are never in two steps at once, and a target never in two at once (yet).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator import scheduler
from orchestrator.config import CoreConfig
from orchestrator.draft_desk import Drafter
from orchestrator.events import Command, DropTarget, ToTargetWorker, WakeAt
from orchestrator.k_policy import KPolicy
from orchestrator.metrics import Counters
from orchestrator.request import Mode
from orchestrator.scheduler import Pick, Wait
from orchestrator.sequence import Flight, Sequence
from protos.codec import row_hash
from protos.messages import Extend, Hello, Step, StepClose, StepOpen, Stepped, TreeNode, Verdict


@dataclass(slots=True)
class Target:
    """A connected target: the step it is busy with, and the closes it has yet to be told."""

    hello: Hello
    in_flight: int = 0
    closes: list[StepClose] = field(default_factory=list)


class TargetDesk:
    """All targets. Memory is promised for the worst case when a sequence is admitted."""

    def __init__(
        self, config: CoreConfig, policy: KPolicy, counters: Counters, out: list[Command]
    ) -> None:
        self._config = config
        self._policy = policy
        self._counters = counters
        self._out = out
        self._next_step = 1
        self._lost_since: dict[int, float] = {}
        self.targets: dict[int, Target] = {}

    @property
    def connected(self) -> bool:
        return bool(self.targets)

    @property
    def memory_tokens(self) -> int:
        """The memory of the largest target, in tokens."""
        sizes = (t.hello.num_pages * t.hello.page_size for t in self.targets.values())
        return max(sizes, default=0)

    def hello(self, index: int, hello: Hello, served: Iterable[Sequence]) -> None:
        """A target said hello, for the first time or again: it holds nothing of ours."""
        self._lost_since.pop(index, None)
        self.targets[index] = Target(hello)
        for seq in served:
            seq.forget_target()

    def lost(self, index: int, served: Iterable[Sequence], now: float) -> None:
        """A target is gone; its sequences wait for its return."""
        self._counters.targets_lost += self.targets.pop(index, None) is not None
        self._lost_since.setdefault(index, now)
        for seq in served:
            seq.forget_target()

    def given_up(self, index: int, now: float) -> bool:
        """True if a lost target has not returned in time."""
        return now - self._lost_since.get(index, now) >= self._config.recovery_s

    def could_hold(self, limit: int) -> bool:
        """True if some target could serve a sequence of `limit` tokens, were it empty."""
        return any(self._pages(t, limit) <= t.hello.num_pages for t in self.targets.values())

    def place(self, limit: int, running: Iterable[Sequence]) -> int | None:
        """The target with most unpromised pages, if that is enough for `limit` tokens."""
        free = {index: target.hello.num_pages for index, target in self.targets.items()}
        for seq in running:
            if seq.target in free:
                free[seq.target] -= self._pages(self.targets[seq.target], seq.limit)
        best = max(free, key=lambda index: (free[index], -index), default=None)
        if best is None or free[best] < self._pages(self.targets[best], limit):
            return None
        return best

    def close(self, seq: Sequence) -> None:
        """Free the sequence with the next step of its target."""
        target = self.targets.get(seq.target)
        if target is not None and seq.opened:
            target.closes.append(StepClose(seq.seq, seq.keep))

    def landed(self, index: int, stepped: Stepped) -> bool:
        """Take note that a step has ended; False if it is none of ours."""
        target = self.targets.get(index)
        if target is None or target.in_flight != stepped.step:
            self._counters.stepped_stale += 1
            return False
        target.in_flight = 0
        return True

    def drop(self, index: int, cause: str) -> None:
        """Cut the link to a target whose answer makes no sense."""
        self._counters.target_faults += 1
        self._out.append(DropTarget(index, cause))

    def schedule(
        self, running: Iterable[Sequence], drafters: Mapping[int, Drafter], now: float
    ) -> None:
        """Start a step on every idle target that has work and nothing worth waiting for."""
        for index, target in self.targets.items():
            if target.in_flight:
                continue
            runnable = [s for s in running if s.target == index and s.flight is None]
            if runnable and self._waits(runnable, drafters, now):
                continue
            if runnable or target.closes:
                self._start(index, target, runnable)

    def wanted(self, seq: Sequence) -> int:
        """K for the sequence's next round."""
        if seq.mode is Mode.OFF:
            return 0
        return self._policy.k(seq.seq, seq.rounds) if seq.request.k is None else seq.request.k

    def _waits(self, runnable: list[Sequence], drafters: Mapping[int, Drafter], now: float) -> bool:
        patience = {seq.seq: self._patience(seq, drafters) for seq in runnable}
        until = scheduler.wait_until(runnable, lambda seq: patience[seq.seq])
        if until > now:
            self._counters.waits += 1
            self._out.append(WakeAt(until))
            return True
        for seq in runnable:
            wait = patience[seq.seq]
            if wait and seq.drafting and seq.tree.size < wait.nodes and wait.until <= now:
                self._counters.waits_in_vain += 1
                drafters[seq.drafting.drafter].in_time = False
        return False

    def _patience(self, seq: Sequence, drafters: Mapping[int, Drafter]) -> Wait | None:
        sync = seq.mode is Mode.SYNC
        patience = self._config.sync_patience_s if sync else self._config.patience_s
        nodes = min(self.wanted(seq), seq.room)
        if seq.drafting is None or nodes <= 0 or patience == 0.0:
            return None
        if not drafters[seq.drafting.drafter].in_time:
            return None
        return Wait(nodes if sync else 1, seq.waiting_since + patience)

    def _start(self, index: int, target: Target, runnable: list[Sequence]) -> None:
        rows = min(self._config.step_rows, target.hello.max_rows)
        picks = scheduler.plan(runnable, rows, self.wanted, self._config.shape)
        opens = tuple(
            StepOpen(p.seq.seq, tuple(p.seq.tokens), p.seq.request.sampling)
            for p in picks
            if not p.seq.opened
        )
        extends = tuple(self._fly(pick) for pick in picks)
        closes = tuple(target.closes)
        target.closes.clear()
        target.in_flight = self._next_step
        self._next_step += 1
        self._counters.steps += 1
        drafted = any(seq.drafting is not None for seq in runnable)
        cores = self._config.cores_shared if drafted else self._config.cores_alone
        step = Step(
            target.in_flight, row_hash(opens, extends, closes), opens, extends, closes, cores
        )
        self._out.append(ToTargetWorker(index, step))

    def _fly(self, pick: Pick) -> Extend:
        """Mark the sequence as in flight; its row group."""
        seq = pick.seq
        parents = scheduler.parents(pick.nodes)
        extend = Extend(
            seq.seq,
            seq.cached,
            tuple(seq.tokens[seq.cached : pick.end]),
            tuple(TreeNode(p, n.token) for p, n in zip(parents, pick.nodes, strict=True)),
            seq.keep,
        )
        seq.flight = Flight(
            self._next_step, seq.frontier, pick.end, pick.nodes, pick.wanted, pick.clamp
        )
        seq.opened, seq.keep, seq.last_step = True, (), self._next_step
        return extend

    def _pages(self, target: Target, limit: int) -> int:
        rows = limit + max(self._config.k, 0)
        return -(-rows // target.hello.page_size)


def fits(flight: Flight, verdict: Verdict) -> bool:
    """True if the verdict can be an answer to what was asked: a walk down the selected nodes."""
    if verdict.start != flight.frontier or verdict.next_token < 0:
        return False
    parent = None
    for i in verdict.walk:
        if not 0 <= i < len(flight.nodes) or flight.nodes[i].parent is not parent:
            return False
        parent = flight.nodes[i]
    return True
