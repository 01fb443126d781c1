"""Keeps drafters informed and mirrors what they grow; knows nothing of steps and clients.

Whatever a drafter sends, the mirror holds exactly the nodes that stand on the committed prefix.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.config import CoreConfig
from orchestrator.events import Command, DropDrafter, ToDrafterWorker
from orchestrator.metrics import Counters
from orchestrator.patience import Patience
from orchestrator.request import Mode
from orchestrator.sequence import Drafting, Sequence
from protos.draft_tree import Ids
from protos.messages import Advance, Close, Grow, Hello, Need, Open, Report

MAX_FAULTS = 8  # a drafter may be wrong that often before its link is cut


@dataclass(slots=True)
class Drafter:
    """A connected drafter, how many sequences it has, how often it was wrong, its last report."""

    hello: Hello
    load: int = 0
    faults: int = 0
    report: Report | None = None


class DraftDesk:
    """All drafters, and the openings of sequences at them."""

    def __init__(
        self,
        config: CoreConfig,
        counters: Counters,
        out: list[Command],
        patience: Patience,
    ) -> None:
        self._config = config
        self._patience = patience
        self._counters = counters
        self._out = out
        self.drafters: dict[int, Drafter] = {}
        self.vocab_size = 0  # the target's: a guess beyond it can never be verified

    def connected(self, index: int, hello: Hello, running: Iterable[Sequence]) -> None:
        """A drafter said hello, for the first time or again: it holds nothing of ours."""
        self._forget(index, running)
        self._patience.forget(index)
        self.drafters[index] = Drafter(hello)
        for seq in running:
            self.open(seq)

    def lost(self, index: int, running: Iterable[Sequence]) -> None:
        """A drafter is gone; its sequences go on with another one, or without."""
        self._forget(index, running)
        self._counters.drafters_lost += 1
        for seq in running:
            self.open(seq)

    def open(self, seq: Sequence) -> None:
        """Give a sequence without a drafter to the least loaded one that can hold it."""
        if seq.mode is Mode.OFF or seq.drafting is not None:
            return
        fit = [(d.load, i) for i, d in self.drafters.items() if seq.frontier < d.hello.max_context]
        seq.degraded |= not fit
        if not fit:
            return
        index = min(fit)[1]
        seq.openings += 1
        self._counters.openings += 1
        self.drafters[index].load += 1
        ids = Ids("drafter", memory=self._config.credit)
        seq.drafting = Drafting(index, seq.openings, ids)
        opening = Open(
            seq.seq, seq.openings, tuple(seq.tokens), seq.request.sampling, self._credit(seq)
        )
        self._out.append(ToDrafterWorker(index, opening))

    def advance(self, seq: Sequence, start: int) -> None:
        """Tell the drafter what was committed from `start` on."""
        drafting = seq.drafting
        if drafting is None:
            return
        message = Advance(
            seq.seq, drafting.opening, start, tuple(seq.tokens[start:]), self._credit(seq)
        )
        self._out.append(ToDrafterWorker(drafting.drafter, message))

    def close(self, seq: Sequence) -> None:
        """End the sequence's opening, if it has one."""
        drafting = seq.drafting
        if drafting is None:
            return
        _end(seq)
        self.drafters[drafting.drafter].load -= 1
        self._out.append(ToDrafterWorker(drafting.drafter, Close(seq.seq, drafting.opening)))

    def grow(self, index: int, seq: Sequence | None, message: Grow, now: float) -> None:
        """Walk new nodes into the mirror of this sequence's tree."""
        drafting = _opening_of(seq, index, message.opening)
        if seq is None or drafting is None:
            self._counters.grows_stale += 1
            return
        self._counters.grows += 1
        was_ready = self._patience.is_ready(seq)
        if self._take(seq, drafting.ids, message):
            self._fault(index, seq)
        elif not was_ready and self._patience.is_ready(seq):
            self._patience.answered(seq, now)
        if not message.nodes:
            drafting.rests_at = message.frontier

    def need(self, index: int, seq: Sequence | None, message: Need) -> None:
        """Send again what the drafter lacks."""
        self._counters.needs += 1
        if seq is None or _opening_of(seq, index, message.opening) is None:
            return
        if 0 <= message.start <= seq.frontier:
            self.advance(seq, message.start)
        else:
            self._drop(index, f"needs position {message.start} of {seq.frontier}")

    def _take(self, seq: Sequence, ids: Ids, message: Grow) -> bool:
        """True if the message shows that both ends no longer agree."""
        if not 1 <= message.frontier <= seq.frontier:
            return True
        dists = message.dists or (b"",) * len(message.nodes)
        if len(dists) != len(message.nodes):
            return True
        for guess, dist in zip(message.nodes, dists, strict=True):
            if guess.id < ids.next_id:
                self._counters.guesses_repeated += 1
                continue
            if guess.id > ids.next_id or not 0 <= guess.parent < guess.id:
                return True
            node = None
            if 0 <= guess.token < self.vocab_size:
                node = ids.place(seq.tree, seq.tokens, message.frontier, guess)
            else:
                ids.skip()
                self._counters.guesses_foreign += 1
            if node is not None:
                node.dist = dist
            self._counters.guesses += 1
            self._counters.guesses_gone += node is None
        return ids.live > self._config.credit

    def report(self, index: int, report: Report) -> None:
        """Keep what a drafter says of its load."""
        if index in self.drafters:
            self.drafters[index].report = report

    def _fault(self, index: int, seq: Sequence) -> None:
        """Begin the opening anew; a drafter that goes on being wrong is cut off."""
        self._counters.drafter_faults += 1
        self.drafters[index].faults += 1
        if self.drafters[index].faults > MAX_FAULTS:
            self._out.append(DropDrafter(index, f"{MAX_FAULTS} messages that cannot be"))
            return
        self._counters.reopenings += 1
        self.close(seq)
        self.open(seq)

    def _drop(self, index: int, cause: str) -> None:
        self._counters.drafter_faults += 1
        self._out.append(DropDrafter(index, cause))

    def _forget(self, index: int, running: Iterable[Sequence]) -> None:
        self.drafters.pop(index, None)
        for seq in running:
            if seq.drafting is not None and seq.drafting.drafter == index:
                _end(seq)

    def _credit(self, seq: Sequence) -> int:
        limit = self._config.credit
        if seq.mode is Mode.SYNC:
            limit = min(limit, self._patience.wanted(seq))
        return max(0, min(limit, seq.room))


def _end(seq: Sequence) -> None:
    """The opening's guesses end with it, so that a tree never holds those of two."""
    if seq.drafting is not None:
        seq.tree.drop_source(seq.drafting.ids.source)
        seq.drafting = None


def _opening_of(seq: Sequence | None, index: int, opening: int) -> Drafting | None:
    """The sequence's drafting if it is this opening at this drafter."""
    drafting = seq.drafting if seq is not None else None
    if drafting is None or (drafting.drafter, drafting.opening) != (index, opening):
        return None
    return drafting
