"""The count of a target's pages: what is sure, what sharing allows, what cannot be."""

import random

import pytest

from orchestrator.ledger import Ledger


def ledger(*, free: int = 10, closing: int = 0) -> Ledger:
    made = Ledger(total=10, page_size=4)
    made.free = made.low = made.high = free
    made.closing = closing
    return made


def test_a_new_target_has_all_pages_free() -> None:
    made = Ledger(total=10, page_size=4)
    assert (made.free, made.expected, made.surely_free(0)) == (10, 10, 10)


@pytest.mark.parametrize(("rows", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_rows_take_whole_pages(rows: int, pages: int) -> None:
    assert ledger().pages(rows) == pages


def test_closing_frees_all_pages_that_only_one_table_holds() -> None:
    assert ledger(free=4, closing=2).surely_free(4) == 6


def test_pages_counted_twice_may_live_on() -> None:
    # Tables of 4 and 3 pages hold 6 together: one page is in both.
    assert ledger(free=4, closing=3).surely_free(4) == 6
    assert ledger(free=4, closing=3).expected == 7


def test_without_sharing_the_outcome_of_a_step_is_known_to_the_page() -> None:
    for free, fits in ((4, False), (5, True), (6, False)):
        made = ledger(free=6, closing=2)
        made.start(held=2, taken=3)
        assert (made.low, made.high) == (5, 5)
        wrong = made.land(free, 0)
        assert (wrong == "") is fits
        assert fits or wrong == f"{free} pages are free, by our count 5 of 10"
        assert (made.free, made.closing) == (free, 0)


def test_what_opens_found_may_have_been_held_or_not() -> None:
    for free, fits in ((3, False), (4, True), (6, True), (7, False)):
        made = ledger(free=6)
        made.start(held=4, taken=0)
        assert (made.land(free, 2) == "") is fits


def test_what_closes_free_is_known_up_to_what_is_shared() -> None:
    for free, fits in ((4, False), (5, True), (6, True), (7, False)):
        made = ledger(free=4, closing=2)
        made.start(held=5, taken=0)
        assert (made.land(free, 0) == "") is fits


@pytest.mark.parametrize("seed", range(50))
def test_any_history_of_tables_that_share_stays_within_the_count(seed: int) -> None:
    draw = random.Random(seed)
    total = 30
    made = Ledger(total, 1)
    tables: dict[int, list[int]] = {}
    for step in range(60):
        used = {page for table in tables.values() for page in table}
        assert made.free == total - len(used)
        closing = [seq for seq in tables if draw.random() < 0.2]
        made.closing = sum(len(tables[seq]) for seq in closing)
        held = sum(map(len, tables.values())) - made.closing
        sure = made.surely_free(held)
        for seq in closing:
            del tables[seq]
        used = {page for table in tables.values() for page in table}
        unused = [page for page in range(total) if page not in used]
        assert sure <= len(unused)
        taken = 0
        for table in tables.values():
            more = draw.randrange(-1, 2) if table else 0
            if more < 0 and sum(table[-1] in other for other in tables.values()) == 1:
                unused.append(table.pop())
                taken -= 1
            elif more > 0 and taken < sure and unused:
                table.append(unused.pop())
                taken += 1
        made.start(held, taken)
        found = 0
        if tables and draw.random() < 0.5:
            whole = draw.choice(list(tables.values()))
            tables[1000 + step] = whole[: draw.randrange(4)]
            found = len(tables[1000 + step])
        elif len(unused) > 3:
            tables[step] = [unused.pop() for _ in range(2)]  # cached, and held by nobody
            found = 2
        free = total - len({page for table in tables.values() for page in table})
        assert made.land(free, found) == ""
