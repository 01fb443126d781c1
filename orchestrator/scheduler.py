"""What goes into the next target step, and whether to wait a moment for drafts first.

Pure functions of the sequences' state. Prefill, plain decode and verification are one thing:
committed rows the target lacks, then guesses.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from orchestrator.request import Mode
from orchestrator.select import select
from orchestrator.sequence import Sequence
from protos.draft_tree import Node


@dataclass(frozen=True, slots=True)
class Pick:
    """What of one sequence goes into a step: committed tokens up to `end`, then guesses."""

    seq: Sequence
    end: int
    nodes: tuple[Node, ...]
    wanted: int
    clamp: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The patience with a sequence: how many guesses make it ready, and until when to wait."""

    nodes: int
    until: float


def wait_until(runnable: Iterable[Sequence], patience: Callable[[Sequence], Wait | None]) -> float:
    """When the step must start; 0 for at once.

    `patience` gives None for a sequence that expects no draft. A due prefill, a sequence that
    expects none and an asynchronous one with guesses never wait for another's draft.
    """
    until = 0.0
    for seq in runnable:
        wait = patience(seq)
        if seq.pending > 1 or wait is None:
            return 0.0
        if seq.tree.size >= wait.nodes:
            if seq.mode is Mode.ASYNC:
                return 0.0
            continue
        until = wait.until if until == 0.0 else min(until, wait.until)
    return until


@dataclass(slots=True)
class Budget:
    """What a step may still take: rows, and pages of `page_size` rows beyond those tables have.

    A table with n rows has -(-n // page_size) pages.
    """

    rows: int
    pages: int
    page_size: int

    def trim(self, seq: Sequence) -> None:
        """Give back what the table holds beyond the cached rows: the place of old guesses."""
        self.pages += seq.pages + -seq.cached // self.page_size

    def reach(self, start: int, end: int) -> int:
        """How far a table with `start` rows can grow, up to `end`."""
        room = (self.pages - -start // self.page_size) * self.page_size
        return max(start, min(end, start + self.rows, room))

    def take(self, start: int, end: int) -> bool:
        """Let a table with `start` rows grow to `end`; False, and nothing taken, if it cannot."""
        more = -start // self.page_size - -end // self.page_size
        if end - start > self.rows or more > max(0, self.pages):
            return False
        self.rows -= end - start
        self.pages -= more
        return True

    def reserve(self, seqs: Iterable[Sequence]) -> int:
        """Set pages aside for all committed rows of these sequences; how many."""
        size = self.page_size
        pages = sum(-seq.cached // size - -seq.frontier // size for seq in seqs)
        self.pages -= pages
        return pages


def plan(
    runnable: Iterable[Sequence], budget: Budget, wanted: Callable[[Sequence], int], shape: str
) -> list[Pick]:
    """Share the budget out: a row for every decoding sequence, then guesses, then prefill.

    Guesses get no page that a committed row needs. The least recently served go first, so that
    none waits for ever when rows are short.
    """
    order = sorted(runnable, key=lambda seq: (seq.last_step, seq.seq))
    decoding = [seq for seq in order if seq.pending == 1][: budget.rows]
    for seq in decoding:
        budget.trim(seq)
    # Whoever gets no page has no old guesses either: its cached rows end with its last page.
    decoding = [seq for seq in decoding if budget.take(seq.cached, seq.frontier)]
    prefilling = [seq for seq in order if seq.pending > 1]
    pages = budget.reserve(prefilling)
    # Guesses leave prefill a share, or streams that are much drafted would starve it.
    rows = min(sum(s.pending for s in prefilling), budget.rows, max(1, budget.rows // 4))
    budget.rows -= rows
    picks = [_pick(seq, seq.frontier, budget, wanted(seq), shape) for seq in decoding]
    budget.pages += pages
    budget.rows += rows
    for seq in prefilling:
        end = budget.reach(seq.cached, seq.frontier)
        if end > seq.cached:
            budget.take(seq.cached, end)
            k = wanted(seq) if end == seq.frontier else 0
            picks.append(_pick(seq, end, budget, k, shape))
    return picks


def _pick(seq: Sequence, end: int, budget: Budget, wanted: int, shape: str) -> Pick:
    rows = budget.rows
    most = budget.reach(end, end + min(wanted, seq.room)) - end
    nodes = select(seq.tree, most, "chain" if seq.request.sampling.needs_dists else shape)
    budget.take(end, end + len(nodes))
    return Pick(seq, end, nodes, wanted, _clamp(seq, wanted, rows, most, len(nodes)))


def _clamp(seq: Sequence, wanted: int, rows: int, most: int, used: int) -> str:
    """Why fewer guesses are used than wanted; empty if they are not."""
    if used >= wanted:
        return ""
    if used < most:
        return "draft"
    if used == seq.room:
        return "length"
    return "rows" if used == rows else "pages"


def parents(nodes: Rows[Node]) -> list[int]:
    """The index of each node's parent among `nodes`, -1 for the root."""
    index = {id(node): i for i, node in enumerate(nodes)}
    return [-1 if node.parent is None else index[id(node.parent)] for node in nodes]
