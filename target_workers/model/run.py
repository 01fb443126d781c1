"""One path's consecutive rows, as whoever lays out a forward and whoever computes it see them."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

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
