"""Sends steps to targets and takes their answers; sees to it that every step's pages are there.

Sequences are never in two steps at once, and a target never in two at once (yet).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator import scheduler
from orchestrator.answers import fault
from orchestrator.capacity import Capacity
from orchestrator.config import CoreConfig
from orchestrator.events import Command, DropTarget, ToTargetWorker, WakeAt
from orchestrator.k_policy import KPolicy
from orchestrator.ledger import Ledger
from orchestrator.metrics import Counters
from orchestrator.patience import Patience
from orchestrator.request import Mode
from orchestrator.scheduler import Budget, Pick
from orchestrator.sequence import Flight, Sequence
from protos.codec import row_hash
from protos.messages import Extend, Hello, Step, StepClose, StepOpen, Stepped, TreeNode

DROPPED = -1  # no step has this number: a target that is cut off gets none until it is back


@dataclass(slots=True)
class Target:
    """A connected target: the step it is busy with, and the closes it has yet to be told.

    `opening` are the sequences which that step does nothing but open, and how.
    """

    hello: Hello
    in_flight: int = 0
    sent_at: float = 0.0
    closes: list[StepClose] = field(default_factory=list)
    opening: list[tuple[Sequence, StepOpen]] = field(default_factory=list)


class TargetDesk:
    """All targets. What they hold is counted by `capacity`."""

    def __init__(
        self, config: CoreConfig, policy: KPolicy, counters: Counters, out: list[Command]
    ) -> None:
        self._config = config
        self._policy = policy
        self.patience = Patience(config, self.wanted)
        self._counters = counters
        self._out = out
        self._next_step = 1
        self._lost_since: dict[int, float] = {}
        self.targets: dict[int, Target] = {}
        self.capacity = Capacity(config)

    @property
    def connected(self) -> bool:
        return bool(self.targets)

    def hello(self, index: int, hello: Hello, served: Iterable[Sequence]) -> None:
        """A target said hello, for the first time or again: it holds nothing of ours."""
        self._lost_since.pop(index, None)
        self.targets[index] = Target(hello)
        self.capacity.ledgers[index] = Ledger(hello.num_pages, hello.page_size)
        for seq in served:
            seq.forget_target()

    def lost(self, index: int, served: Iterable[Sequence], now: float) -> None:
        """A target is gone; its sequences wait for its return."""
        self._counters.targets_lost += self.targets.pop(index, None) is not None
        self.capacity.ledgers.pop(index, None)
        self._lost_since.setdefault(index, now)
        for seq in served:
            seq.forget_target()

    def given_up(self, index: int, now: float) -> bool:
        """True if a lost target has not returned in time."""
        return now - self._lost_since.get(index, now) >= self._config.recovery_s

    def all_given_up(self, now: float) -> bool:
        """True if no target is there and none has returned in time."""
        return not self.targets and all(self.given_up(index, now) for index in self._lost_since)

    def close(self, seq: Sequence) -> None:
        """Free the sequence with the next step of its target."""
        self.capacity.forget(seq)
        target = self.targets.get(seq.target)
        if target is not None and seq.opened:
            target.closes.append(StepClose(seq.seq, seq.keep))
            self.capacity.ledgers[seq.target].closing += seq.most_pages

    def landed(self, index: int, stepped: Stepped) -> bool:
        """Take note that a step has ended; False if it is none of ours or cannot have."""
        target = self.targets.get(index)
        if target is None or target.in_flight != stepped.step:
            self._counters.stepped_stale += 1
            if stepped.step >= self._next_step:
                self.drop(index, f"answers step {stepped.step}, which was never sent")
            return False
        ledger = self.capacity.ledgers[index]
        if wrong := fault([opened for _, opened in target.opening], stepped, ledger):
            self.drop(index, f"step {stepped.step}: {wrong}")
            return False
        for (seq, _), found in zip(target.opening, stepped.cached, strict=False):
            seq.take_up(found, ledger.pages(found))
            self._counters.cached_tokens += found
        target.opening.clear()
        target.in_flight = 0
        return True

    def drop(self, index: int, cause: str) -> None:
        """Cut the link to a target whose answer makes no sense."""
        self._counters.target_faults += 1
        if index in self.targets:
            self.targets[index].in_flight = DROPPED
        self._out.append(DropTarget(index, cause))

    def expire(self, now: float) -> None:
        """Cut the links to targets that do not answer their step."""
        for index, target in self.targets.items():
            if target.in_flight > 0 and now - target.sent_at >= self._config.step_timeout_s:
                self.drop(index, f"no answer to step {target.in_flight} in time")

    def schedule(self, running: Iterable[Sequence], now: float) -> None:
        """Start a step on every idle target that has work and nothing worth waiting for."""
        for index, target in self.targets.items():
            if target.in_flight:
                continue
            runnable = [s for s in running if s.target == index and self._runs(s)]
            new = [s for s in runnable if _may_find(s, target.hello.page_size)]
            if new:
                self._open(index, runnable, new)
            elif runnable and self._waits(runnable, now):
                continue
            elif runnable or target.closes:
                self._start(index, runnable)
            if target.in_flight:
                target.sent_at = now

    def _runs(self, seq: Sequence) -> bool:
        return self.capacity.runs(seq) and not seq.awaits_parent

    def wanted(self, seq: Sequence) -> int:
        """K for the sequence's next round."""
        if seq.mode is Mode.OFF:
            return 0
        return self._policy.k(seq.seq, seq.rounds) if seq.request.k is None else seq.request.k

    def _waits(self, runnable: list[Sequence], now: float) -> bool:
        until = scheduler.wait_until(runnable, self.patience.wait)
        if until > now:
            self._counters.waits += 1
            self.patience.begin(runnable)
            self._out.append(WakeAt(until))
            return True
        self._counters.waits_in_vain += self.patience.end(runnable, now)
        return False

    def _open(self, index: int, runnable: list[Sequence], new: list[Sequence]) -> None:
        """A step that only opens: answered at once, it says where their first Extends start."""
        ledger = self.capacity.ledgers[index]
        ledger.start(sum(seq.pages for seq in runnable), 0)
        opens = tuple(self._opening(seq) for seq in new)
        self.targets[index].opening = list(zip(new, opens, strict=True))
        for seq in new:
            seq.pages = ledger.pages(seq.frontier)  # at most, until the answer
        self._send(index, opens)

    def _start(self, index: int, runnable: list[Sequence]) -> None:
        target, ledger = self.targets[index], self.capacity.ledgers[index]
        self._make_room(ledger, runnable)
        held = sum(seq.pages for seq in runnable)
        rows = min(self._config.step_rows, target.hello.max_rows)
        # Who needs a page that the closes may or may not free waits for their answer.
        budget = Budget(rows, ledger.surely_free(held), ledger.page_size)
        picks = self._plan(_suspects_alone(runnable), budget)
        if not picks and not target.closes:  # the others have the pages, for guesses of old
            picks = self._plan(runnable, budget)
        assert picks or target.closes, "a sequence that has the target to itself fits"
        opens = tuple(self._opening(pick.seq) for pick in picks if not pick.seq.opened)
        tables = [ledger.pages(pick.end + len(pick.nodes)) for pick in picks]
        ledger.start(held, sum(tables) - sum(pick.seq.pages for pick in picks))
        extends = tuple(map(self._fly, picks, tables))
        drafted = any(seq.drafting is not None for seq in runnable)
        cores = self._config.cores_shared if drafted else self._config.cores_alone
        self._send(index, opens, extends, cores)

    def _plan(self, runnable: list[Sequence], budget: Budget) -> list[Pick]:
        return scheduler.plan(runnable, budget, self.wanted, self._config.shape)

    def _make_room(self, ledger: Ledger, runnable: list[Sequence]) -> None:
        """Pause the youngest until the committed rows of the others fit.

        `runnable` are all that run on the target, the oldest first; the oldest always stays.
        """
        missing = sum(ledger.pages(seq.frontier) - seq.pages for seq in runnable)
        while missing > ledger.expected and len(runnable) > 1:
            youngest = runnable.pop()
            missing -= ledger.pages(youngest.frontier) - youngest.pages
            self._pause(youngest)

    def _pause(self, seq: Sequence) -> None:
        """Take a sequence off its target; it keeps what it has committed and guessed."""
        self._counters.preemptions += 1
        self.close(seq)
        seq.forget_target()
        self.capacity.pause(seq)

    def _opening(self, seq: Sequence) -> StepOpen:
        seq.opened = True
        self._counters.opened_tokens += seq.frontier
        request = seq.request
        return StepOpen(
            seq.seq,
            tuple(seq.tokens),
            request.sampling,
            cache_salt=request.cache_salt,
            prefix_cache=request.prefix_cache,
            parent=-1 if seq.parent is None else seq.parent.seq,
            scoring=request.scoring,
        )

    def _fly(self, pick: Pick, pages: int) -> Extend:
        """Mark the sequence as in flight; its row group."""
        seq = pick.seq
        parents = scheduler.parents(pick.nodes)
        extend = Extend(
            seq.seq,
            seq.cached,
            tuple(seq.tokens[seq.cached : pick.end]),
            tuple(TreeNode(p, n.token) for p, n in zip(parents, pick.nodes, strict=True)),
            seq.keep,
            dists=_dists(seq, pick),
        )
        seq.flight = Flight(
            self._next_step, seq.frontier, pick.end, pick.nodes, pick.wanted, pick.clamp, pages
        )
        seq.keep, seq.last_step = (), self._next_step
        return extend

    def _send(
        self,
        index: int,
        opens: tuple[StepOpen, ...],
        extends: tuple[Extend, ...] = (),
        cores: int = 0,
    ) -> None:
        target = self.targets[index]
        closes = tuple(target.closes)
        target.closes.clear()
        target.in_flight = self._next_step
        self._next_step += 1
        self._counters.steps += 1
        step = Step(
            target.in_flight, row_hash(opens, extends, closes), opens, extends, closes, cores
        )
        self._out.append(ToTargetWorker(index, step))


def _dists(seq: Sequence, pick: Pick) -> tuple[bytes, ...]:
    """What each node was drawn from, where the rule asks for it."""
    is_drawn = seq.request.sampling.needs_dists
    return tuple(node.dist for node in pick.nodes) if is_drawn else ()


def _suspects_alone(runnable: list[Sequence]) -> list[Sequence]:
    """After the loss of a target, what was in flight then goes one by one, to find the cause."""
    suspects = [seq for seq in runnable if seq.losses]
    return suspects[:1] or runnable


def _may_find(seq: Sequence, page_size: int) -> bool:
    """True if opening the sequence before its first Extend may save some of it."""
    shares = seq.parent is not None or (seq.request.prefix_cache and seq.frontier > page_size)
    return shares and not seq.opened
