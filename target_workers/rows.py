"""Lays the rows of Extends out as runs for one forward, and says which rows decide a token.

A run is consecutive positions of one path. A chain is one run with the tokens it hangs under; each
side branch of a tree is a run of its own that sees the rows of its ancestors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from protos.messages import Extend, TreeNode
from target_workers.acceptance import depths
from target_workers.model.chooser import Chooser
from target_workers.model.run import Run
from target_workers.pages import Slots


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that decide an Extend's tokens: draw `first` after the root, then one for each node."""

    extend: Extend
    chooser: Chooser
    first: int

    @property
    def end(self) -> int:
        """The position of the token drawn at the root."""
        return self.extend.start + len(self.extend.tokens)

    @property
    def draws(self) -> range:
        """The places of its rows among all draws."""
        return range(self.first, self.first + 1 + len(self.extend.nodes))


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows from `first` on which say how likely the prompt's `tokens` were, one each."""

    first: int
    tokens: tuple[int, ...]
    best: int

    @property
    def rows(self) -> slice:
        """Of the batch."""
        return slice(self.first, self.first + len(self.tokens))

    def pieces(self, size: int) -> Iterator["PromptRows"]:
        """The same in parts of so many rows at most."""
        for at in range(0, len(self.tokens), size):
            yield PromptRows(self.first + at, self.tokens[at : at + size], self.best)


@dataclass(slots=True)
class Draws:
    """What is asked of a forward: rows whose logits decide a token, and rows of prompts to score.

    `positions` are of the tokens drawn.
    """

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    prompts: list[PromptRows] = field(default_factory=list)


class Layout:
    """The runs and draws of one forward, one Extend after the other."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.draws = Draws()
        self.num_rows = 0

    def add(self, extend: Extend, slots: Slots, decides: Chooser | None) -> None:
        """Lay an Extend out, and a block of draws if it `decides` tokens.

        `slots` has the slot of every row of the sequence; node i is row `end + i`.
        """
        end = extend.start + len(extend.tokens)
        root = self.num_rows + len(extend.tokens) - 1
        rows = self._add_runs(extend, slots)
        if decides is None:
            return
        self.draws.blocks.append(Block(extend, decides, len(self.draws.rows)))
        self.draws.rows += (root, *rows)
        self.draws.positions += (end, *(end + depth + 1 for depth in depths(extend.nodes)))

    def score(self, tokens: tuple[int, ...], best: int) -> None:
        """Ask how likely these tokens were after the rows of the Extend that is laid out next."""
        self.draws.prompts.append(PromptRows(self.num_rows, tokens, best))

    def _add_runs(self, extend: Extend, slots: Slots) -> list[int]:
        end = extend.start + len(extend.tokens)
        trunk, *branches = chains(extend.nodes)
        rows = [0] * len(extend.nodes)
        tokens = np.array((*extend.tokens, *(extend.nodes[i].token for i in trunk)))
        own = np.concatenate((slots[extend.start : end], slots[end:][trunk]))
        self._add_run(Run(tokens, extend.start, own, slots[: extend.start]))
        for row, i in enumerate(trunk, start=self.num_rows - len(trunk)):
            rows[i] = row
        for branch in branches:
            above = ancestors(extend.nodes, branch[0])
            history = np.concatenate((slots[:end], slots[end:][above]))
            tokens = np.array([extend.nodes[i].token for i in branch])
            for row, i in enumerate(branch, start=self.num_rows):
                rows[i] = row
            self._add_run(Run(tokens, end + len(above), slots[end:][branch], history))
        return rows

    def _add_run(self, run: Run) -> None:
        self.runs.append(run)
        self.num_rows += len(run.tokens)


def chains(nodes: Sequence[TreeNode]) -> list[list[int]]:
    """The nodes as chains, each node under the one before it; the first hangs under the root."""
    found: list[list[int]] = [[]]
    ends = {-1: found[0]}
    for i, node in enumerate(nodes):
        chain = ends.pop(node.parent, None)
        if chain is None:
            chain = []
            found.append(chain)
        chain.append(i)
        ends[i] = chain
    return found


def ancestors(nodes: Sequence[TreeNode], i: int) -> list[int]:
    """The nodes above node i, from the root down."""
    above: list[int] = []
    while (i := nodes[i].parent) >= 0:
        above.append(i)
    return above[::-1]
