"""Page tables: what is held, what is free, and that both always add up."""

import random

import numpy as np
import pytest

from target_workers.pages import Pages


def make(total: int = 6, page_size: int = 4, **rows: int) -> Pages:
    pages = Pages(total, page_size)
    for seq, count in enumerate(rows.values()):
        pages.open(seq)
        assert pages.grow(seq, count)
    return pages


@pytest.mark.parametrize(("rows", "held"), [(0, 0), (1, 1), (4, 1), (5, 2), (24, 6)])
def test_rows_take_whole_pages(rows: int, held: int) -> None:
    pages = make(a=rows)
    assert (pages.held(0), pages.free) == (held, 6 - held)
    assert len(pages.slots(0)) == 4 * held


def test_the_lowest_free_page_is_taken_first() -> None:
    pages = make(a=4, b=8, c=4)
    pages.close(1)
    pages.trim(0, 0)
    pages.open(3)
    assert pages.grow(3, 12)
    assert pages.slots(3).tolist() == list(range(12))
    assert pages.slots(2).tolist() == [12, 13, 14, 15]


def test_growing_leaves_earlier_rows_where_they_are() -> None:
    pages = make(a=6, b=4)
    before = pages.slots(0).copy()
    assert pages.grow(0, 13)
    assert pages.slots(0)[:8].tolist() == before.tolist()
    assert pages.slots(0)[8:].tolist() == [12, 13, 14, 15, 16, 17, 18, 19]


def test_growing_to_fewer_rows_frees_nothing() -> None:
    pages = make(a=9)
    assert pages.grow(0, 2)
    assert pages.held(0) == 3


def test_trimming_keeps_the_page_of_the_last_row() -> None:
    pages = make(a=20)
    pages.trim(0, 9)
    assert (pages.held(0), pages.free) == (3, 3)
    assert len(pages.slots(0)) == 12
    pages.check()


@pytest.mark.parametrize("forked", [False, True])
def test_a_failed_growth_changes_nothing_and_works_later(forked: bool) -> None:
    """Case B045: three pages, two more wanted, one free."""
    pages = make(a=12, b=8)
    seq = 2 if forked else 0
    if forked:
        pages.open(2)
        assert pages.fork(2, 0, 12)[0] == 12
    before = pages.slots(seq).tolist()
    assert not pages.grow(seq, 20)
    assert (pages.held(seq), pages.free) == (3, 1)
    assert pages.slots(seq).tolist() == before
    pages.close(1)
    assert pages.grow(seq, 20)
    pages.check()


def test_the_same_calls_give_the_same_tables() -> None:
    assert _random_tables(5) == _random_tables(5)


@pytest.mark.parametrize("seed", range(20))
def test_no_page_is_lost_or_shared_by_any_history(seed: int) -> None:
    tables = _random_tables(seed)
    slots = [slot for table in tables.values() for slot in table]
    assert len(slots) == len(set(slots))


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda pages: pages._tables[1].pages.__setitem__(0, 0), "references"),
        (lambda pages: pages._tables[1].pages.pop(), "references"),
        (lambda pages: pages._free.append(0), "two owners"),
        (lambda pages: pages._free.remove(3), "lost"),
    ],
)
def test_the_check_finds_a_page_that_is_lost_or_held_twice(plant, found) -> None:
    pages = make(a=4, b=4)
    pages.check()
    plant(pages)
    with pytest.raises(AssertionError, match=found):
        pages.check()


def test_the_idle_check_finds_what_no_sequence_holds() -> None:
    pages = make(a=4)
    with pytest.raises(AssertionError, match="tables without a sequence"):
        pages.check_idle()
    pages.close(0)
    pages.check_idle()
    pages._free.pop()
    with pytest.raises(AssertionError, match="1 pages are lost"):
        pages.check_idle()


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda pages: pages._references.__setitem__(2, 1), "held by no table"),
        (lambda pages: pages._free.__setitem__(0, pages._free[1]), "free twice"),
    ],
)
def test_the_idle_check_looks_at_every_page(plant, found) -> None:
    pages = make()
    plant(pages)
    with pytest.raises(AssertionError, match=found):
        pages.check_idle()


def test_pages_with_rows_to_come_are_shared_with_nobody() -> None:
    pages = make(a=10, b=2)
    pages.check_rows({0: 10, 1: 2})
    pages.check_rows({0: 12, 1: 0})
    pages.open(2)
    pages.fork(2, 0, 8)
    pages.check_rows({0: 8, 1: 2, 2: 8})
    with pytest.raises(AssertionError, match="sequence 0 shares page 1"):
        pages.check_rows({0: 7, 1: 2, 2: 8})
    pages.enter(1, [b"key"])
    with pytest.raises(AssertionError, match="sequence 1 shares page 3"):
        pages.check_rows({0: 8, 1: 2, 2: 8})
    with pytest.raises(AssertionError, match="rows of sequence 1 have no page"):
        pages.check_rows({0: 8, 1: 5, 2: 8})
    with pytest.raises(AssertionError, match="a table without"):
        pages.check_rows({0: 8, 1: 2})


def test_slots_are_what_torch_indexes_with() -> None:
    assert make(a=1).slots(0).dtype == np.int64


def _random_tables(seed: int) -> dict[int, list[int]]:
    draw = random.Random(seed)
    pages = Pages(40, 4)
    rows: dict[int, int] = {}
    for seq in range(200):
        call = draw.choice(("open", "grow", "grow", "trim", "close"))
        if call == "open" or not rows:
            pages.open(seq)
            rows[seq] = 0
            continue
        known = draw.choice(sorted(rows))
        if call == "grow":
            more = rows[known] + draw.randrange(20)
            rows[known] = more if pages.grow(known, more) else rows[known]
        elif call == "trim":
            rows[known] = draw.randint(0, rows[known])
            pages.trim(known, rows[known])
        else:
            pages.close(known)
            del rows[known]
        pages.check()
        assert all(pages.held(s) * 4 >= count for s, count in rows.items())
    return {seq: pages.slots(seq).tolist() for seq in rows}
