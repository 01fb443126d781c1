"""The core: events in, commands out. No clock, no randomness, no I/O; a log of events replays.

It owns the life of every sequence. What to verify is scheduler.py's business, what drafters
know draft_desk.py's.
"""

from collections import deque
from collections.abc import Callable, Iterator

from orchestrator import lookup
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
from orchestrator.target_desk import TargetDesk, fits
from protos.draft_tree import DraftTree
from protos.messages import Grow, Hello, Need, Stepped, Verdict

RETRY_S = 1.0


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
        self._queue: deque[tuple[float, Request]] = deque()
        self._next_seq = 1
        self._draining = False
        self.targets = TargetDesk(config, policy, self.counters, self._out)
        self.capacity = self.targets.capacity
        self.drafts = DraftDesk(config, self.counters, self._out, self.targets.wanted)

    @property
    def sequences(self) -> Iterator[Sequence]:
        """All sequences being served."""
        return iter(self._sequences.values())

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def handle(self, event: Event) -> list[Command]:
        """Take one event; what to do about it, in order."""
        self._react(event)
        if not isinstance(event, DrafterSaid):  # a drafter frees no pages
            self._admit(event.now)
        self.targets.schedule(self._sequences.values(), self.drafts.drafters, event.now)
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
                self._draining = True
            case TargetSaid(_, target, Hello() as hello):
                self._target_hello(target, hello)
            case TargetLost(now, target, _):
                self.targets.lost(target, self._on_target(target), now)
            case DrafterSaid(_, drafter, Hello() as hello):
                self.drafts.connected(drafter, hello, list(self._sequences.values()))
            case DrafterLost(_, drafter, _):
                self.drafts.lost(drafter, list(self._sequences.values()))

    # Requests

    def _submit(self, request: Request, now: float) -> None:
        self.counters.requests += 1
        refusal = self._refusal(request)
        if refusal is not None:
            self.counters.refused += 1
            self._tell(request.request_id, refusal)
            return
        self._ids[request.request_id] = 0
        self._queue.append((now, request))

    def _refusal(self, request: Request) -> Refused | None:
        if request.request_id in self._ids:
            return Refused(Refusal.DUPLICATE, f"request {request.request_id!r} is being served")
        if self._draining:
            return Refused(Refusal.DRAINING, "the server is shutting down", RETRY_S)
        if not self.targets.connected:
            return Refused(Refusal.NO_TARGET, "no target worker is connected", RETRY_S)
        if not self.capacity.could_hold(self._limit(request)):
            return Refused(
                Refusal.TOO_LARGE,
                f"{self._limit(request)} tokens exceed the target's memory of "
                f"{self.capacity.tokens} tokens; ask for fewer, or give it more pages",
            )
        free = self.config.max_sequences - len(self._sequences)
        if len(self._queue) >= self.config.max_queue + max(0, free):
            return Refused(
                Refusal.QUEUE_FULL,
                f"{len(self._sequences)} requests run and {len(self._queue)} wait: no more fit",
                RETRY_S,
            )
        return None

    def _limit(self, request: Request) -> int:
        return min(len(request.prompt) + request.max_tokens, self.config.max_context)

    def _admit(self, now: float) -> None:
        self.capacity.resume(self._sequences.values())
        while self._queue and len(self._sequences) < self.config.max_sequences:
            since, request = self._queue[0]
            target = self.capacity.place(request, self._limit(request), self._sequences.values())
            if target is None:
                return
            self._queue.popleft()
            seq = self._begin(request, target, now)
            seq.wait_s = now - since
            seq.deadline = since + self.config.max_request_s
            self.drafts.open(seq)
            self._look_up(seq)

    def _begin(self, request: Request, target: int, now: float) -> Sequence:
        tokens = [*request.prompt, *request.resumed]
        mode = request.mode or self.config.mode
        uses_lookup = self.config.lookup and mode is not Mode.OFF
        seq = Sequence(
            seq=self._next_seq,
            request=request,
            mode=mode,
            target=target,
            stopper=self._make_stopper(request),
            tokens=tokens,
            limit=self._limit(request),
            tree=DraftTree(len(tokens)),
            deadline=now,
            lookup=lookup.NgramIndex(tokens) if uses_lookup else None,
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
        self._queue = deque(item for item in self._queue if item[1].request_id != request_id)
        self._tell(request_id, Finished(reason, Stats()))

    def _expire(self, now: float) -> None:
        for since, request in [*self._queue]:
            if now - since >= self.config.max_request_s:
                self._unqueue(request.request_id, FinishReason.TIMEOUT)
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
        for seq in self._on_target(index):
            flight = seq.flight
            if flight is None or flight.step != stepped.step:
                continue
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
        self._tell(seq.request.request_id, Delta(done.tokens))
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
