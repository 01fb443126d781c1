"""The rows of one forward: runs of consecutive positions, laid out flat without padding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive positions of one path: row i is written to slots[i].

    It sees the rows up to itself and `history`, a slot for each position before `start`. A draft
    tree is several runs: the main path, then each side branch, whose history ends in slots that
    other runs of the forward write (all rows of a layer are written before any attends).
    """

    tokens: IntArray
    start: int
    slots: IntArray
    history: IntArray

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """Rows in run order; rows beyond `num_rows` repeat the last, for kernels that want company."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    num_rows: int
    runs: tuple[Run, ...]

    def padded(self, least: int) -> "RowBatch":
        """The same rows, at least `least` of them."""
        if len(self.tokens) >= least:
            return self
        repeat = torch.arange(least).clamp_(max=self.num_rows - 1)
        return RowBatch(
            tokens=self.tokens[repeat],
            positions=self.positions[repeat],
            slots=self.slots[repeat],
            num_rows=self.num_rows,
            runs=self.runs,
        )

    def to(self, device: torch.device) -> "RowBatch":
        """The same rows on a device; the runs stay where plans are made."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
        )


def build_batch(runs: Sequence[Run]) -> RowBatch:
    """Lay out runs as the rows of one forward: row order is run order, then position."""
    assert runs, "a forward needs at least one run"
    for run in runs:
        assert len(run.tokens) == len(run.slots) > 0, "a run needs one slot for each of its tokens"
        assert len(run.history) == run.start, "a run's history has a slot for each earlier position"
    positions = np.concatenate([np.arange(run.start, run.end) for run in runs])
    return RowBatch(
        tokens=_join([run.tokens for run in runs]),
        positions=torch.from_numpy(positions),
        slots=_join([run.slots for run in runs]),
        num_rows=len(positions),
        runs=tuple(runs),
    )


def tree_runs(
    trunk: Run, tokens: IntArray, parents: Sequence[int], slots: IntArray
) -> tuple[list[Run], IntArray]:
    """The runs of a draft tree under `trunk`, and each node's row among their rows.

    A parent comes before its children; -1 is the last row of the trunk, which the first path
    continues.
    """
    paths = _paths(parents)
    rows = np.empty(len(parents), np.int64)
    rows[[node for path in paths for node in path]] = len(trunk.tokens) + np.arange(len(parents))
    seen = np.concatenate((trunk.history, trunk.slots))
    main = Run(
        tokens=np.concatenate((trunk.tokens, tokens[paths[0]])),
        start=trunk.start,
        slots=np.concatenate((trunk.slots, slots[paths[0]])),
        history=trunk.history,
    )
    branches = []
    for path in paths[1:]:
        history = np.concatenate((seen, slots[_above(parents, path[0])]))
        branches.append(Run(tokens[path], len(history), slots[path], history))
    return [main, *branches], rows


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """Nodes in paths: a node goes on from its parent where no sibling did. The trunk's is first."""
    paths: list[list[int]] = [[]]
    path_ending_at = {-1: paths[0]}
    for node, parent in enumerate(parents):
        assert parent < node, "a parent comes before its children"
        path = path_ending_at.pop(parent, None)
        if path is None:
            path = []
            paths.append(path)
        path.append(node)
        path_ending_at[node] = path
    return paths


def _above(parents: Sequence[int], node: int) -> list[int]:
    """The ancestors of a node, top first."""
    path: list[int] = []
    while (node := parents[node]) >= 0:
        path.append(node)
    return path[::-1]


def _join(parts: list[IntArray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))
