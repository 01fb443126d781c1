"""Who may run on which target, by the pages there: admission, pausing, resuming. Pure arithmetic.

On every target the paused sequences are younger than the running ones, and the oldest always runs.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items

from orchestrator.config import CoreConfig
from orchestrator.ledger import Ledger
from orchestrator.request import Request
from orchestrator.sequence import Sequence


class Capacity:
    """The ledgers of all connected targets, and the sequences that wait to be computed again."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._paused: dict[int, Sequence] = {}
        self.ledgers: dict[int, Ledger] = {}

    @property
    def tokens(self) -> int:
        """The memory of the largest target, in tokens."""
        return max((led.total * led.page_size for led in self.ledgers.values()), default=0)

    def could_hold(self, limit: int) -> bool:
        """True if some target could serve a sequence of `limit` tokens, were it empty."""
        return any(self.holds(index, limit) for index in self.ledgers)

    def holds(self, index: int, limit: int) -> bool:
        """True if this target could."""
        ledger = self.ledgers[index]
        return ledger.pages(limit) <= ledger.total

    def place(self, request: Request, limit: int, running: Collection[Sequence]) -> int | None:
        """The target with most pages left, if that is enough for a new sequence.

        On a target with paused sequences nobody comes before them.
        """
        paused = {seq.target for seq in self._paused.values()}
        left = {i: self._left(i, running) for i in self.ledgers if i not in paused}
        best = max(left, key=lambda index: (left[index], -index), default=None)
        if best is None:
            return None
        tokens = len(request.prompt) + len(request.resumed)
        missing = self._needs(best, tokens, limit) - left[best]
        if missing > 0 and missing > self._shared(best, request, running):
            return None
        return best

    def runs(self, seq: Sequence) -> bool:
        """True unless the sequence is paused."""
        return seq.seq not in self._paused

    def pause(self, seq: Sequence) -> None:
        """Let a sequence wait until it can be computed again."""
        self._paused[seq.seq] = seq

    def forget(self, seq: Sequence) -> None:
        """A sequence has ended, paused or not."""
        self._paused.pop(seq.seq, None)

    def resume(self, running: Collection[Sequence]) -> None:
        """Let paused sequences run again, the oldest first, as far as there are pages."""
        full: set[int] = set()
        for seq in sorted(self._paused.values(), key=lambda seq: seq.seq):
            if seq.target in full or seq.target not in self.ledgers:
                continue
            if self._left(seq.target, running) < self._needs(seq.target, seq.frontier, seq.limit):
                full.add(seq.target)
            else:
                del self._paused[seq.seq]

    def _left(self, index: int, running: Collection[Sequence]) -> int:
        """The pages that running sequences will not need before long."""
        needed = sum(
            max(0, self._needs(index, seq.frontier, seq.limit) - seq.most_pages)
            for seq in running
            if seq.target == index and self.runs(seq)
        )
        return self.ledgers[index].expected - needed

    def _needs(self, index: int, tokens: int, limit: int) -> int:
        """Pages for so many tokens, and to go on for a while: a block of guesses and a page."""
        ledger = self.ledgers[index]
        return ledger.pages(min(limit, tokens + self._config.k + ledger.page_size))

    def _shared(self, index: int, request: Request, running: Iterable[Sequence]) -> int:
        """Pages that a new sequence will have in common with a running one that begins alike."""
        size = self.ledgers[index].page_size
        most = (len(request.prompt) - 1) // size  # the last token is computed anew
        for seq in running:
            if seq.target != index or not _may_share(seq.request, request):
                continue
            whole = min(seq.cached // size, most)
            if common := _common_pages(request.prompt, seq.tokens[: whole * size], size):
                return common
        return 0


def _may_share(one: Request, other: Request) -> bool:
    return one.prefix_cache and other.prefix_cache and one.cache_salt == other.cache_salt


def _common_pages(one: Items[int], other: Items[int], size: int) -> int:
    """How many whole pages of `other` are at the start of `one` too."""
    for start in range(0, len(other), size):
        if tuple(one[start : start + size]) != tuple(other[start : start + size]):
            return start // size
    return len(other) // size
