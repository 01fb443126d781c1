"""How long a step may wait for drafts: decided by how each drafter has answered before.

A drafter that did not answer in time is not waited for until it does, judged apart for each mode.
"""

from collections.abc import Callable, Iterable

from orchestrator.config import CoreConfig
from orchestrator.request import Mode
from orchestrator.scheduler import Wait
from orchestrator.sequence import Sequence


class Patience:
    """What is known of the drafters' answers, and which sequences are being waited for."""

    def __init__(self, config: CoreConfig, wanted: Callable[[Sequence], int]) -> None:
        self.wanted = wanted
        self._config = config
        self._answer_s: dict[tuple[int, Mode], float] = {}
        self._awaited: set[int] = set()

    def wait(self, seq: Sequence) -> Wait | None:
        """How many guesses make the sequence ready and until when to wait; None for not at all."""
        nodes, drafting = self._nodes(seq), seq.drafting
        if drafting is None or nodes <= 0 or drafting.rests_at == seq.frontier:
            return None
        patience_s = self._patience_s(seq)
        if self._answer_s.get((drafting.drafter, seq.mode), 0.0) >= patience_s:
            return None
        return Wait(nodes, seq.waiting_since + patience_s)

    def is_ready(self, seq: Sequence) -> bool:
        """True if the sequence has the guesses a step would wait for."""
        return seq.tree.size >= self._nodes(seq)

    def answered(self, seq: Sequence, now: float) -> None:
        """The sequence's drafter has just made it ready."""
        if seq.drafting is not None:
            self._answer_s[seq.drafting.drafter, seq.mode] = now - seq.waiting_since

    def begin(self, seqs: Iterable[Sequence]) -> None:
        """A step is being held up for these."""
        self._awaited.update(seq.seq for seq in seqs if not self.is_ready(seq))

    def end(self, seqs: Iterable[Sequence], now: float) -> int:
        """The step starts; how many of these were waited for in vain."""
        late = 0
        for seq in seqs:
            wait = self.wait(seq) if seq.seq in self._awaited else None
            if wait is None or seq.drafting is None or self.is_ready(seq) or now < wait.until:
                continue
            key = (seq.drafting.drafter, seq.mode)
            self._answer_s[key] = max(self._answer_s.get(key, 0.0), self._patience_s(seq))
            late += 1
        self._awaited.clear()
        return late

    def forget(self, drafter: int) -> None:
        """A drafter is there anew: it is trusted again."""
        self._answer_s = {key: s for key, s in self._answer_s.items() if key[0] != drafter}

    def _nodes(self, seq: Sequence) -> int:
        """A whole block in synchronous mode, else a first guess; never more than can come."""
        most = min(self.wanted(seq), seq.room, self._config.credit)
        return most if seq.mode is Mode.SYNC else min(most, 1)

    def _patience_s(self, seq: Sequence) -> float:
        sync = seq.mode is Mode.SYNC
        return self._config.sync_patience_s if sync else self._config.patience_s
