"""The core: events in, commands out. No clock, no randomness, no I/O; a log of events replays.

It owns the life of every sequence. What to verify is scheduler.py's business, what drafters
know draft_desk.py's.
"""

from collections.abc import Callable, Iterator

from orchestrator import lookup
from orchestrator.admission import Admission
from orchestrator.answers import fits
from orchestrator.config import CoreConfig
from orchestrator.draft_desk import DraftDesk
from orchestrator.events import (
    Cancelled,
    Command,
    DrafterLost,
    DrafterSaid,
    Draining,
    Event,
    Round,
    Submitted,
    TargetLost,
    TargetSaid,
    Tell,
    Ticked,
)
from orchestrator.k_policy import KPolicy
from orchestrator.metrics import Counters
from orchestrator.request import (
    Delta,
    Finished,
    FinishReason,
    Mode,
    Refusal,
    Refused,
    Request,
    Stats,
    Stopper,
    Update,
)
from orchestrator.sequence import Committed, Flight, Sequence
from orchestrator.target_desk import TargetDesk
from protos.draft_tree import DraftTree
from protos.messages import Grow, Hello, Need, Report, Stepped, Verdict

MAX_LOSSES = 3  # targets lost on one sequence before it is given up


class Core:
    """Every request from its submission to its last update."""

    def __init__(
        self, config: CoreConfig, policy: KPolicy, make_stopper: Callable[[Request], Stopper]
    ) -> None:
        self.config = config
        self.counters = Counters()
        self._make_stopper = make_stopper
        self._out: list[Command] = []
        self._told: list[Command] = []
        self._sequences: dict[int, Sequence] = {}
        self._ids: dict[str, int] = {}
        self._next_seq = 1
        self.targets = TargetDesk(config, policy, self.counters, self._out)
        self.capacity = self.targets.capacity
        self._admission = Admission(config, self.targets)
        self.drafts = DraftDesk(config, self.counters, self._out, self.targets.patience)

    @property
    def sequences(self) -> Iterator[Sequence]:
        """All sequences being served."""
        return iter(self._sequences.values())

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._admission)

    def handle(self, event: Event) -> list[Command]:
        """Take one event; what to do about it, in order."""
        self._react(event)
        if not isinstance(event, DrafterSaid):  # a drafter frees no pages
            self._admit(event.now)
        self.targets.schedule(self._sequences.values(), event.now)
        commands = [*self._out, *self._told]  # workers first: they are waiting
        self._out.clear()
        self._told.clear()
        return commands

    def _react(self, event: Event) -> None:
        match event:
            case TargetSaid(now, target, Stepped() as stepped):
                self._stepped(target, stepped, now)
            case DrafterSaid(now, drafter, Grow() as grow):
                self.drafts.grow(drafter, self._sequences.get(grow.seq), grow, now)
            case DrafterSaid(_, drafter, Need() as need):
                self.drafts.need(drafter, self._sequences.get(need.seq), need)
            case Submitted(now, request):
                self._submit(request, now)
            case Cancelled(_, request_id):
                self._cancel(request_id)
            case Ticked(now):
                self._expire(now)
            case Draining():
                self._admission.draining = True
            case TargetSaid(_, target, Hello() as hello):
                self._target_hello(target, hello)
            case TargetLost(now, target, _):
                self._target_lost(target, now)
            case DrafterSaid(_, drafter, Report() as report):
                self.drafts.report(drafter, report)
            case DrafterSaid(_, drafter, Hello() as hello):
                self.drafts.connected(drafter, hello, list(self._sequences.values()))
            case DrafterLost(_, drafter, _):
                self.drafts.lost(drafter, list(self._sequences.values()))
            case TargetSaid(_, target, message):
                self.targets.drop(target, f"a target does not say {type(message).__name__}")

    # Requests

    def _submit(self, request: Request, now: float) -> None:
        self.counters.requests += 1
        if request.request_id in self._ids:
            detail = f"request {request.request_id!r} is being served"
            refused: Refused | None = Refused(Refusal.DUPLICATE, detail)
        else:
            refused = self._admission.submit(request, now, len(self._sequences))
        if refused is not None:
            self.counters.refused += 1
            self._tell(request.request_id, refused)
        else:
            self._ids[request.request_id] = 0

    def _admit(self, now: float) -> None:
        self.capacity.resume(self._sequences.values())
        while admitted := self._admission.admit(self._sequences.values()):
            seq = self._begin(admitted.request, admitted.target, now)
            seq.wait_s = now - admitted.since
            seq.deadline = admitted.since + self.config.max_request_s
            self.drafts.open(seq)
            self._look_up(seq)

    def _begin(self, request: Request, target: int, now: float) -> Sequence:
        tokens = [*request.prompt, *request.resumed]
        mode = request.mode or self.config.mode
        is_drawn = request.sampling.needs_dists
        uses_lookup = self.config.lookup and mode is not Mode.OFF and not is_drawn
        seq = Sequence(
            seq=self._next_seq,
            request=request,
            mode=mode,
            target=target,
            stopper=self._make_stopper(request),
            tokens=tokens,
            limit=self._admission.limit(request),
            tree=DraftTree(len(tokens)),
            deadline=now,
            lookup=lookup.NgramIndex(tokens) if uses_lookup else None,
            parent=self._sequences.get(self._ids.get(request.parent, 0)),
            waiting_since=now,
        )
        self._next_seq += 1
        self._ids[request.request_id] = seq.seq
        self._sequences[seq.seq] = seq
        return seq

    def _cancel(self, request_id: str) -> None:
        seq_id = self._ids.get(request_id)
        if seq_id is None:
            return
        self.counters.cancelled += 1
        if seq_id:
            self._finish(self._sequences[seq_id], FinishReason.CANCELLED)
        else:
            self._unqueue(request_id, FinishReason.CANCELLED)

    def _unqueue(self, request_id: str, reason: FinishReason) -> None:
        del self._ids[request_id]
        self._admission.remove(request_id)
        self._tell(request_id, Finished(reason, Stats()))

    def _expire(self, now: float) -> None:
        for request_id, reason in self._admission.overdue(now):
            self._unqueue(request_id, reason)
        self.targets.expire(now)
        for seq in [*self._sequences.values()]:
            if now >= seq.deadline:
                self._finish(seq, FinishReason.TIMEOUT)
            elif self.targets.given_up(seq.target, now):
                self._finish(seq, FinishReason.UNAVAILABLE)

    def _finish(self, seq: Sequence, reason: FinishReason, error: str = "") -> None:
        """End a sequence everywhere; its rows leave the target with the next step."""
        self.counters.finished += 1
        self.drafts.close(seq)
        self.targets.close(seq)
        seq.ended = True
        del self._sequences[seq.seq]
        del self._ids[seq.request.request_id]
        self._tell(seq.request.request_id, Finished(reason, seq.stats(), error))

    def _tell(self, request_id: str, update: Update) -> None:
        self._told.append(Tell(request_id, update))

    # What workers said

    def _stepped(self, index: int, stepped: Stepped, now: float) -> None:
        if not self.targets.landed(index, stepped):
            return
        verdicts = {verdict.seq: verdict for verdict in stepped.verdicts}
        prompts = {told.seq: told for told in stepped.prompts}
        for seq in self._on_target(index):
            flight = seq.flight
            if flight is None or flight.step != stepped.step:
                continue
            told = prompts.get(seq.seq)
            if told is not None and (scored := seq.take_scores(told)) is not None:
                self._tell(seq.request.request_id, scored)
            verdict = verdicts.get(seq.seq)
            if verdict is not None and verdict.error:
                self._finish(seq, FinishReason.ERROR, verdict.error)
            elif flight.is_prefill:
                seq.end_chunk()
            elif verdict is None or not fits(flight, verdict):
                self.targets.drop(index, f"step {stepped.step}: no verdict that fits {seq.seq}")
                return
            else:
                self._reconcile(seq, flight, verdict, now)

    def _reconcile(self, seq: Sequence, flight: Flight, verdict: Verdict, now: float) -> None:
        number = seq.rounds
        done = seq.reconcile(verdict)
        seq.waiting_since = now
        self.counters.add_round(len(flight.nodes), done)
        if done.tokens:
            self._tell(seq.request.request_id, Delta(done.tokens, done.scores))
        self._told.append(_round(now, seq, number, flight, done))
        if done.finish is not None:
            self._finish(seq, done.finish)
            return
        self.drafts.advance(seq, flight.frontier)
        self._look_up(seq)

    def _look_up(self, seq: Sequence) -> None:
        """Fill an empty tree at once from the sequence's own past."""
        k = min(self.targets.wanted(seq), seq.room)
        if seq.lookup is None or seq.tree.children or k <= 0:
            return
        node = None
        for token in seq.lookup.continuation(k):
            node = seq.tree.add(node, token)
            node.scores[lookup.SOURCE] = lookup.LOGPROB
            self.counters.looked_up += 1

    def _target_hello(self, index: int, hello: Hello) -> None:
        self.drafts.vocab_size = hello.vocab_size
        self.targets.hello(index, hello, self._on_target(index))
        for seq in self._on_target(index):
            if not self.capacity.holds(index, seq.limit):
                self._finish(seq, FinishReason.UNAVAILABLE, "the target has less memory now")

    def _target_lost(self, index: int, now: float) -> None:
        """Its sequences wait for its return, but for one that takes it down again and again."""
        self.targets.lost(index, self._on_target(index), now)
        for seq in self._on_target(index):
            if seq.losses >= MAX_LOSSES:
                self._finish(seq, FinishReason.ERROR, "the target was lost each time it ran this")

    def _on_target(self, index: int) -> list[Sequence]:
        return [seq for seq in self._sequences.values() if seq.target == index]


def _round(now: float, seq: Sequence, number: int, flight: Flight, done: Committed) -> Round:
    return Round(
        now=now,
        seq=seq.seq,
        number=number,
        frontier=flight.frontier,
        wanted=flight.wanted,
        used=len(flight.nodes),
        clamp=flight.clamp,
        accepted=done.accepted,
        committed=done.tokens,
        hit=done.hit,
        sources=tuple(sorted({name for node in flight.nodes for name in node.scores})),
    )
