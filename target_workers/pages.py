"""Which slots of the KV cache hold which rows of which sequence, by pages.

Invariant: every page is free or in exactly one table. Allocation is a function of the calls
alone (the lowest free page first), so every shard that makes the same calls has the same tables.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]


@dataclass(slots=True)
class _Table:
    """The pages of one sequence in the order of its rows, and the slot of every row."""

    pages: list[int] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: np.empty(0, np.int64))


class Pages:
    """All page tables of one shard. Row i of a sequence is in slot i of its table."""

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._free = list(range(total))
        self._tables: dict[int, _Table] = {}

    @property
    def free(self) -> int:
        """How many pages no table holds."""
        return len(self._free)

    def held(self, seq: int) -> int:
        """How many pages the sequence holds."""
        return len(self._tables[seq].pages)

    def open(self, seq: int) -> None:
        """Give a sequence an empty table."""
        assert seq not in self._tables, f"sequence {seq} has a table"
        self._tables[seq] = _Table()

    def close(self, seq: int) -> None:
        """Free all pages of a sequence and forget it."""
        self.trim(seq, 0)
        del self._tables[seq]

    def grow(self, seq: int, rows: int) -> bool:
        """Hold at least `rows` rows; False, and nothing changed, if there are too few pages."""
        table = self._tables[seq]
        missing = self._pages_for(rows) - len(table.pages)
        if missing > len(self._free):
            return False
        if missing > 0:
            new = [heapq.heappop(self._free) for _ in range(missing)]
            table.pages.extend(new)
            table.slots = np.concatenate((table.slots, self._slots_of(new)))
        return True

    def trim(self, seq: int, rows: int) -> None:
        """Free the pages beyond the first `rows` rows."""
        table = self._tables[seq]
        kept = self._pages_for(rows)
        for page in table.pages[kept:]:
            heapq.heappush(self._free, page)
        del table.pages[kept:]
        table.slots = table.slots[: kept * self.page_size]

    def slots(self, seq: int) -> Slots:
        """The slot of every row the sequence has room for.  # [rows]"""
        return self._tables[seq].slots

    def check(self) -> None:
        """Assert the invariant."""
        used = [page for table in self._tables.values() for page in table.pages]
        pages = sorted(self._free + used)
        assert pages == list(range(self.total)), "a page is lost or has two owners"

    def _pages_for(self, rows: int) -> int:
        return -(-rows // self.page_size)

    def _slots_of(self, pages: list[int]) -> Slots:
        first = np.asarray(pages, np.int64) * self.page_size
        return (first[:, None] + np.arange(self.page_size)).reshape(-1)
