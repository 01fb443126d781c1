"""The pages of one target as the orchestrator counts them. Pure arithmetic; the target owns them.

Every sequence's table is counted in full, that of one opened with a parent too: the pages of the
rows it found, the last of them perhaps a copy of its own. Pages that several tables hold are
therefore counted more than once; by how many, the target's own figure says.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Ledger:
    """`free` pages were in no table after the last step, as the target said.

    `closing` pages are in tables whose close has yet to be sent. After the step that runs now,
    `low` to `high` pages are in no table; they are one, unless tables with shared pages end.
    """

    total: int
    page_size: int
    free: int = 0
    closing: int = 0
    low: int = 0
    high: int = 0

    def __post_init__(self) -> None:
        self.free = self.low = self.high = self.total

    def pages(self, rows: int) -> int:
        """How many pages so many rows take."""
        return -(-rows // self.page_size)

    def surely_free(self, held: int) -> int:
        """At least so many pages are in no table once the closes are done; open ones hold `held`.

        Of the closing tables as many pages may live on in others as are counted more than once.
        """
        shared = held + self.closing - (self.total - self.free)
        return self.free + max(0, self.closing - shared)

    def start(self, held: int, taken: int) -> None:
        """A step carries all closes out and takes `taken` pages more than it gives back."""
        self.low = self.surely_free(held) - taken
        self.high = self.free + self.closing - taken
        self.closing = 0

    def land(self, free: int, found: int) -> str:
        """The step has ended: what the target says, and how many pages its opens began with.

        Why that cannot be, if it cannot.
        """
        low, high = max(0, self.low - found), min(self.high, self.total)
        self.free = self.low = self.high = free
        if low <= free <= high:
            return ""
        expected = str(low) if low == high else f"{low} to {high}"
        return f"{free} pages are free, by our count {expected} of {self.total}"

    @property
    def expected(self) -> int:
        """About so many pages are in no table after this step and the closes."""
        return min(self.total, self.low + self.closing)
