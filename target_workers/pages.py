"""Which slots of the KV cache hold which rows of which sequence, by pages.

Invariant: every page is free, cached and in no table, or in as many tables as it has references.
Allocation is a function of the calls alone (the lowest free page first, then the cached one least
recently used), so every shard that makes the same calls has the same tables. Of a model with a
sliding window the pages before the window stay held: other sequences may yet begin with them.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from target_workers.prefix_cache import PrefixCache

Slots = NDArray[np.int64]


@dataclass(slots=True)
class _Table:
    """The pages of one sequence in the order of its rows, and the slot of every row.

    The first `entered` pages are whole and were offered to the prefix cache or found in it.
    """

    pages: list[int] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: np.empty(0, np.int64))
    entered: int = 0


class Pages:
    """All page tables of one shard. Row i of a sequence is in slot i of its table."""

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._free = list(range(total))
        self._references = [0] * total
        self._tables: dict[int, _Table] = {}
        self._cache = PrefixCache()

    @property
    def free(self) -> int:
        """How many pages a table can still be given: free ones, and cached ones in no table."""
        return len(self._free) + self._cache.idle

    @property
    def cached(self) -> int:
        """How many pages are in no table and yet kept for their tokens."""
        return self._cache.idle

    @property
    def shared(self) -> int:
        """How many places in tables hold a page that another place holds too."""
        places = sum(len(table.pages) for table in self._tables.values())
        return places - (self.total - self.free)

    def held(self, seq: int) -> int:
        """How many pages the sequence holds."""
        return len(self._tables[seq].pages)

    def open(self, seq: int, keys: Iterable[bytes] = ()) -> int:
        """Give a sequence a table of the cached pages with these keys, up to the first that is
        not there; how many were found."""
        assert seq not in self._tables, f"sequence {seq} has a table"
        table = self._tables[seq] = _Table()
        for key in keys:
            page = self._cache.find(key)
            if page is None:
                break
            self._cache.hold(page)
            self._references[page] += 1
            table.pages.append(page)
        table.entered = len(table.pages)
        table.slots = self._slots_of(table.pages)
        return table.entered

    def fork(self, seq: int, parent: int, rows: int) -> tuple[int, Slots, Slots]:
        """Let a new sequence begin with `rows` rows of another: whole pages are held by both.

        How many rows it got, and the slots from which and to which the last of them must be copied.
        The copy takes a page; if none is free, it got whole pages only.
        """
        table, pages = self._tables[seq], self._tables[parent].pages
        for page in pages[len(table.pages) : rows // self.page_size]:
            self._references[page] += 1
            table.pages.append(page)
        table.slots = self._slots_of(table.pages)
        start = len(table.slots)
        if not self.grow(seq, rows):
            rows = start
        return rows, self.slots(parent)[start:rows], table.slots[start:rows]

    def enter(self, seq: int, keys: Sequence[bytes]) -> None:
        """Let the first pages of a sequence be found by these keys, from now on."""
        table = self._tables[seq]
        for i in range(table.entered, len(keys)):
            self._cache.enter(table.pages[i], keys[i])
        table.entered = max(table.entered, len(keys))

    def close(self, seq: int) -> None:
        """Release all pages of a sequence and forget it."""
        self.trim(seq, 0)
        del self._tables[seq]

    def grow(self, seq: int, rows: int) -> bool:
        """Hold at least `rows` rows; False, and nothing changed, if there are too few pages."""
        table = self._tables[seq]
        missing = self._pages_for(rows) - len(table.pages)
        if missing > self.free:
            return False
        if missing > 0:
            new = [self._take() for _ in range(missing)]
            table.pages.extend(new)
            table.slots = np.concatenate((table.slots, self._slots_of(new)))
        return True

    def trim(self, seq: int, rows: int) -> None:
        """Release the pages beyond the first `rows` rows."""
        table = self._tables[seq]
        kept = self._pages_for(rows)
        # The last page first: a page is of no use without those before it, so it is evicted first.
        for page in reversed(table.pages[kept:]):
            self._release(page)
        del table.pages[kept:]
        table.slots = table.slots[: kept * self.page_size]
        table.entered = min(table.entered, kept)

    def slots(self, seq: int) -> Slots:
        """The slot of every row the sequence has room for.  # [rows]"""
        return self._tables[seq].slots

    def check(self) -> None:
        """Assert the invariant."""
        references = Counter(page for table in self._tables.values() for page in table.pages)
        counted = {page: count for page, count in enumerate(self._references) if count}
        assert references == counted, "a page's references are not the tables that hold it"
        pages = sorted([*self._free, *self._cache.idle_pages(), *references])
        assert pages == list(range(self.total)), "a page is lost or has two owners"
        self._cache.check()

    def check_rows(self, rows: Mapping[int, int]) -> None:
        """Assert that sequences with so many committed rows have room for them, and that whatever
        page others hold too, or may find, is full of them."""
        assert rows.keys() == self._tables.keys(), "a table without a sequence, or none for one"
        for seq, count in rows.items():
            pages = self._tables[seq].pages
            assert len(pages) >= self._pages_for(count), f"rows of sequence {seq} have no page"
            for page in pages[count // self.page_size :]:
                alone = self._references[page] == 1 and not self._cache.knows(page)
                assert alone, f"sequence {seq} shares page {page}, which it may yet write to"

    def check_idle(self) -> None:
        """Assert that all pages are back, when no sequence is open."""
        assert not self._tables, f"tables without a sequence: {sorted(self._tables)}"
        assert self.free == self.total, f"{self.total - self.free} pages are lost"
        assert not any(self._references), "a page is held by no table"
        unheld = {*self._free, *self._cache.idle_pages()}
        assert len(unheld) == self.total, "a page is free twice"

    def _take(self) -> int:
        page = heapq.heappop(self._free) if self._free else self._cache.evict()
        self._references[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page] and not self._cache.release(page):
            heapq.heappush(self._free, page)

    def _pages_for(self, rows: int) -> int:
        return -(-rows // self.page_size)

    def _slots_of(self, pages: list[int]) -> Slots:
        first = np.asarray(pages, np.int64) * self.page_size
        return (first[:, None] + np.arange(self.page_size)).reshape(-1)
