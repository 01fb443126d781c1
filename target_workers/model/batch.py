"""The rows of one forward: runs of consecutive positions, laid out flat without padding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from target_workers.model.run import IntArray, Run


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """Rows in run order."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    runs: tuple[Run, ...]

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
        runs=tuple(runs),
    )


def _join(parts: list[IntArray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))
