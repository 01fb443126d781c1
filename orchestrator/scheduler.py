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


def plan(
    runnable: Iterable[Sequence], rows: int, wanted: Callable[[Sequence], int], shape: str
) -> list[Pick]:
    """Share `rows` out: a row for every decoding sequence, then guesses, then prefill.

    The least recently served go first, so that none waits for ever when rows are short.
    """
    order = sorted(runnable, key=lambda seq: (seq.last_step, seq.seq))
    decoding = [seq for seq in order if seq.pending == 1][:rows]
    picks = []
    left = rows - len(decoding)
    for seq in decoding:
        pick = _pick(seq, seq.frontier, left, wanted(seq), shape)
        left -= len(pick.nodes)
        picks.append(pick)
    for seq in (seq for seq in order if seq.pending > 1):
        if left == 0:
            break
        end = min(seq.frontier, seq.cached + left)
        left -= end - seq.cached
        k = wanted(seq) if end == seq.frontier else 0
        pick = _pick(seq, end, left, k, shape)
        left -= len(pick.nodes)
        picks.append(pick)
    return picks


def _pick(seq: Sequence, end: int, rows: int, wanted: int, shape: str) -> Pick:
    nodes = select(seq.tree, max(0, min(wanted, seq.room, rows)), shape)
    return Pick(seq, end, nodes, wanted, _clamp(seq, wanted, rows, len(nodes)))


def _clamp(seq: Sequence, wanted: int, rows: int, used: int) -> str:
    """Why fewer guesses are used than wanted; empty if they are not."""
    if used >= wanted:
        return ""
    if used == seq.room:
        return "length"
    return "rows" if used == rows else "draft"


def parents(nodes: Rows[Node]) -> list[int]:
    """The index of each node's parent among `nodes`, -1 for the root."""
    index = {id(node): i for i, node in enumerate(nodes)}
    return [-1 if node.parent is None else index[id(node.parent)] for node in nodes]
