"""The prefix cache against a naive model: a dict of whole token prefixes, without hashes."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from target_workers.pages import Pages
from target_workers.prefix_cache import Prefix

SIZE = 2


def keys(tokens: list[int], salt: str = "") -> list[bytes]:
    """The keys of all whole pages of these tokens."""
    prefix = Prefix(salt, SIZE)
    return [prefix.key(tokens, page) for page in range(len(tokens) // SIZE)]


def filled(pages: Pages, seq: int, tokens: list[int], salt: str = "") -> None:
    """A sequence that has computed and committed these tokens."""
    pages.open(seq)
    assert pages.grow(seq, len(tokens))
    pages.enter(seq, keys(tokens, salt))


def test_a_key_stands_for_all_tokens_up_to_its_pages_end() -> None:
    ones, twos = keys([1, 2, 3, 4]), keys([9, 2, 3, 4])
    assert ones == keys([1, 2, 3, 4, 5])
    assert not set(ones) & set(twos)
    assert len({*ones, *keys([1, 2, 3, 4], "salt"), *keys([3, 4])}) == 5


def test_a_page_without_all_its_tokens_has_no_key() -> None:
    with pytest.raises(AssertionError, match="whole pages"):
        Prefix("", SIZE).key([1, 2, 3], 1)


def test_pages_are_found_up_to_the_first_that_is_not_there() -> None:
    pages = Pages(8, SIZE)
    filled(pages, 1, [1, 2, 3, 4])
    pages.close(1)
    assert pages.open(2, keys([1, 2, 3, 4, 5, 6])) == 2
    assert pages.open(3, keys([1, 2, 9, 9])) == 1
    assert pages.open(4, keys([9, 9, 3, 4])) == 0
    assert (pages.held(2), pages.held(3), pages.held(4), pages.shared) == (2, 1, 0, 1)
    assert pages.slots(3).tolist() == pages.slots(2)[:SIZE].tolist()
    pages.check()


def test_a_shared_page_lives_until_the_last_table_lets_it_go() -> None:
    pages = Pages(2, SIZE)
    filled(pages, 1, [1, 2])
    assert pages.open(2, keys([1, 2])) == 1
    pages.close(1)
    assert (pages.free, pages.cached) == (1, 0)
    pages.close(2)
    assert (pages.free, pages.cached) == (2, 1)


def test_what_two_compute_at_once_is_kept_once() -> None:
    pages = Pages(4, SIZE)
    filled(pages, 1, [1, 2])
    filled(pages, 2, [1, 2])
    assert (pages.free, pages.shared) == (2, 0)
    pages.close(1)
    pages.close(2)
    assert (pages.free, pages.cached) == (4, 1)
    pages.check_idle()


def test_free_pages_are_taken_first_then_the_least_recently_used() -> None:
    pages = Pages(4, SIZE)
    for seq, token in ((1, 1), (2, 2), (3, 3)):
        filled(pages, seq, [token] * SIZE)
    for seq in (2, 1, 3):
        pages.close(seq)
    pages.open(4)
    assert pages.grow(4, 2 * SIZE)
    assert pages.slots(4).tolist() == [6, 7, 2, 3], "the page of the first to close"
    assert [pages.open(5 + t, keys([t] * SIZE)) for t in (1, 2, 3)] == [1, 0, 1]


def test_of_one_sequence_the_last_page_goes_first() -> None:
    pages = Pages(3, SIZE)
    filled(pages, 1, [1, 2, 3, 4, 5, 6])
    pages.close(1)
    filled(pages, 2, [9])
    assert pages.open(3, keys([1, 2, 3, 4, 5, 6])) == 2


def test_a_page_that_a_table_holds_is_never_evicted() -> None:
    pages = Pages(2, SIZE)
    filled(pages, 1, [1, 2])
    pages.open(2)
    assert pages.grow(2, SIZE)
    assert not pages.grow(2, 2 * SIZE)
    assert pages.open(3, keys([1, 2])) == 1


def test_a_page_found_again_is_the_most_recently_used() -> None:
    pages = Pages(2, SIZE)
    filled(pages, 1, [1, 1])
    filled(pages, 2, [2, 2])
    pages.close(1)
    pages.close(2)
    pages.open(3, keys([1, 1]))
    pages.close(3)
    filled(pages, 4, [9])
    assert pages.open(5, keys([1, 1])) == 1


@dataclass
class Naive:
    """Whole prefixes: those in tables by how many hold them, the others in order of last use.

    `private` pages have no prefix that can be found.
    """

    total: int
    idle: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    holders: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    tables: dict[int, list[tuple[str, tuple[int, ...]] | None]] = field(default_factory=dict)
    private: int = 0
    evicted: int = 0

    @property
    def free(self) -> int:
        return self.total - self.private - len(self.holders)

    def open(self, seq: int, prefixes: list[tuple[str, tuple[int, ...]]]) -> int:
        table = self.tables[seq] = []
        for prefix in prefixes:
            if prefix not in self.holders and prefix not in self.idle:
                break
            if prefix in self.idle:
                self.idle.remove(prefix)
            self.holders[prefix] = self.holders.get(prefix, 0) + 1
            table.append(prefix)
        return len(table)

    def grow(self, seq: int, count: int) -> bool:
        table = self.tables[seq]
        missing = max(0, count - len(table))
        if missing > self.free:
            return False
        self.private += missing
        table.extend([None] * missing)
        over = max(0, len(self.idle) - self.free)
        del self.idle[:over]
        self.evicted += over
        return True

    def enter(self, seq: int, prefixes: list[tuple[str, tuple[int, ...]]], entered: int) -> None:
        for i in range(entered, len(prefixes)):
            known = prefixes[i] in self.holders or prefixes[i] in self.idle
            if not known:
                self.tables[seq][i] = prefixes[i]
                self.holders[prefixes[i]] = 1
                self.private -= 1

    def trim(self, seq: int, count: int) -> None:
        table = self.tables[seq]
        while len(table) > count:
            prefix = table.pop()
            if prefix is None:
                self.private -= 1
                continue
            self.holders[prefix] -= 1
            if not self.holders[prefix]:
                del self.holders[prefix]
                self.idle.append(prefix)


class Both:
    """The pages and the naive model, told the same. A slot remembers what was written to it."""

    def __init__(self, total: int) -> None:
        self.pages = Pages(total, SIZE)
        self.naive = Naive(total)
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.committed: dict[int, int] = {}
        self.memory: dict[int, tuple[int, ...]] = {}
        self.found = 0

    def prefixes(self, seq: int, end: int) -> list[tuple[str, tuple[int, ...]]]:
        tokens = self.tokens[seq]
        return [(self.salts[seq], tuple(tokens[:stop])) for stop in range(SIZE, end + 1, SIZE)]

    def open(self, seq: int, tokens: list[int], salt: str) -> None:
        self.tokens[seq], self.salts[seq] = tokens, salt
        found = self.pages.open(seq, iter(keys(tokens[: len(tokens) - 1], salt)))
        assert found == self.naive.open(seq, self.prefixes(seq, len(tokens) - 1))
        self.committed[seq] = found * SIZE
        self.found += found
        for i, slot in enumerate(self.pages.slots(seq).tolist()):
            assert self.memory[slot] == tuple(tokens[: i + 1]), "a page with other tokens was found"

    def compute(self, seq: int, rows: int, guesses: int) -> None:
        """Commit some more rows, and write guesses after them that stay only until the trim."""
        start = self.committed[seq]
        end = min(start + rows, len(self.tokens[seq]))
        pages = -(-(end + guesses) // SIZE)
        grown = self.pages.grow(seq, end + guesses)
        assert grown == self.naive.grow(seq, pages)
        if not grown:
            return
        slots = self.pages.slots(seq).tolist()
        for i in range(start, end + guesses):
            self.memory[slots[i]] = tuple(self.tokens[seq][:end][: i + 1]) if i < end else (-1,)
        entered = self.pages._tables[seq].entered
        self.committed[seq] = end
        self.pages.enter(seq, keys(self.tokens[seq][:end], self.salts[seq]))
        self.naive.enter(seq, self.prefixes(seq, end), entered)

    def trim(self, seq: int) -> None:
        self.pages.trim(seq, self.committed[seq])
        self.naive.trim(seq, -(-self.committed[seq] // SIZE))

    def close(self, seq: int) -> None:
        self.pages.close(seq)
        self.naive.trim(seq, 0)
        del self.tokens[seq], self.naive.tables[seq]

    def check(self) -> None:
        self.pages.check()
        assert self.pages.free == self.naive.free
        for seq, table in self.naive.tables.items():
            assert self.pages.held(seq) == len(table)
            slots = self.pages.slots(seq).tolist()[: self.committed[seq]]
            assert [self.memory[s] for s in slots] == [
                tuple(self.tokens[seq][: i + 1]) for i in range(len(slots))
            ]


def _play(seed: int) -> Both:
    draw = random.Random(seed)
    both = Both(draw.choice((6, 12, 30)))
    for seq in range(120):
        call = draw.choice(("open", "compute", "compute", "trim", "close"))
        if call == "open" or not both.tokens:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
            both.open(seq, tokens, draw.choice(("", "", "salt")))
        else:
            known = draw.choice(sorted(both.tokens))
            calls: dict[str, Callable[[], None]] = {
                "compute": lambda seq=known: both.compute(
                    seq, draw.randrange(6), draw.randrange(5)
                ),
                "trim": lambda seq=known: both.trim(seq),
                "close": lambda seq=known: both.close(seq),
            }
            calls[call]()
        both.check()
    for seq in sorted(both.tokens):
        both.close(seq)
    both.pages.check_idle()
    return both


@pytest.mark.parametrize("seed", range(60))
def test_every_history_finds_evicts_and_frees_what_the_naive_model_does(seed: int) -> None:
    """Case B059: what is found was committed, whatever guesses were written beside it."""
    _play(seed)


def test_the_histories_find_and_evict_enough_to_mean_something() -> None:
    games = [_play(seed) for seed in range(60)]
    assert sum(both.found for both in games) > 500
    assert sum(both.naive.evicted for both in games) > 500


def test_the_same_calls_lead_to_the_same_pages_on_every_shard() -> None:
    assert _play(7).memory == _play(7).memory
