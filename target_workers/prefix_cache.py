"""Finds pages by the tokens in them: a hash chain over whole pages, with eviction.

A key stands for a page's tokens, all tokens before them, and the salt. Nothing here depends on a
clock or on the order of a set, so shards that make the same calls evict the same pages.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Prefix:
    """The keys of one sequence's whole pages, made as they are asked for."""

    salt: str
    page_size: int
    keys: list[bytes] = field(default_factory=list)

    def key(self, tokens: Sequence[int], page: int) -> bytes:
        """The key of a page; `tokens` are the sequence's, at least to the page's end."""
        while len(self.keys) <= page:
            start = len(self.keys) * self.page_size
            held = np.asarray(tokens[start : start + self.page_size], "<i8")
            assert len(held) == self.page_size, "only whole pages have keys"
            above = self.keys[-1] if self.keys else _digest(self.salt.encode(), b"salt")
            self.keys.append(_digest(above + held.tobytes(), b"page"))
        return self.keys[page]


def _digest(data: bytes, kind: bytes) -> bytes:
    """256 bits, different for salts and pages: no client finds what another's tokens led to."""
    return hashlib.blake2b(data, digest_size=32, person=kind).digest()


class PrefixCache:
    """Which page has which key, and which of these pages no table holds.

    Invariant: keys and pages are one to one.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """How many cached pages no table holds."""
        return len(self._idle)

    def find(self, key: bytes) -> int | None:
        """The page with this key."""
        return self._page_of.get(key)

    def knows(self, page: int) -> bool:
        """True if the page has a key."""
        return page in self._key_of

    def enter(self, page: int, key: bytes) -> None:
        """Let a page be found, unless another one is by its key, or it by another key, already."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def hold(self, page: int) -> None:
        """A table holds the page: it cannot be evicted."""
        self._idle.pop(page, None)

    def release(self, page: int) -> bool:
        """No table holds the page any more; True if it stays for its key."""
        if page not in self._key_of:
            return False
        self._idle[page] = None
        return True

    def evict(self) -> int:
        """Forget the page that no table has held for longest."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

    def idle_pages(self) -> list[int]:
        """The cached pages that no table holds, the next to be evicted first."""
        return list(self._idle)

    def check(self) -> None:
        """Assert the invariant."""
        pages = {page: key for key, page in self._page_of.items()}
        assert pages == self._key_of, "a cached page and its key do not belong together"
        assert self._idle.keys() <= pages.keys(), "a page without a key waits for eviction"
