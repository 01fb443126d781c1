"""Lays the rows of Extends out as runs for one forward, and says which rows decide a token.

A run is consecutive positions of one path. A chain is one run with the tokens it hangs under; each
side branch of a tree is a run of its own that sees the rows of its ancestors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from protos.messages import Extend, Sampling, TreeNode
from target_workers.acceptance import depths
from target_workers.model.run import Run
from target_workers.pages import Slots


@dataclass(slots=True)
class Draws:
    """The rows whose logits decide a token, by column; `positions` are of the tokens drawn."""

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def add(self, row: int, position: int, sampling: Sampling) -> None:
        """One more row of the batch."""
        self.rows.append(row)
        self.positions.append(position)
        self.temperatures.append(sampling.temperature)
        self.seeds.append(sampling.seed)


class Layout:
    """The runs and draws of one forward, one Extend after the other."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.draws = Draws()
        self.num_rows = 0

    def add(self, extend: Extend, slots: Slots, decides: Sampling | None) -> range:
        """Lay an Extend out; its draws: after the root, then after each node, if it `decides`.

        `slots` has the slot of every row of the sequence; node i is row `end + i`.
        """
        end = extend.start + len(extend.tokens)
        first = len(self.draws.rows)
        root = self.num_rows + len(extend.tokens) - 1
        rows = self._add_runs(extend, slots)
        if decides is not None:
            self.draws.add(root, end, decides)
            for row, depth in zip(rows, depths(extend.nodes), strict=True):
                self.draws.add(row, end + depth + 1, decides)
        return range(first, len(self.draws.rows))

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
