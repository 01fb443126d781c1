"""Who may run: admission and resumption by what is needed now and for a while."""

import pytest

from orchestrator.capacity import Capacity
from orchestrator.config import CoreConfig
from orchestrator.ledger import Ledger
from orchestrator.request import Mode, Request
from orchestrator.sequence import Sequence
from protos.draft_tree import DraftTree
from tests.unit.orchestrator.test_scheduler import Never

LIMIT = 1000


def capacity(*free: int, k: int = 4) -> Capacity:
    """Targets with so many pages of 4 rows, all free."""
    made = Capacity(CoreConfig(k=k))
    made.ledgers = {i: Ledger(total, 4) for i, total in enumerate(free)}
    return made


def asked(tokens: int = 10, first: int = 0, **fields) -> Request:
    return Request("a", tuple(range(first, first + tokens)), LIMIT, **fields)


def running(seq: int, request: Request, *, pages: int, target: int = 0) -> Sequence:
    """A sequence that has computed its prompt and holds so many pages."""
    tokens = list(request.prompt)
    return Sequence(
        seq=seq,
        request=request,
        mode=Mode.OFF,
        target=target,
        stopper=Never(),
        tokens=tokens,
        limit=LIMIT,
        tree=DraftTree(len(tokens)),
        deadline=1e9,
        opened=True,
        cached=len(tokens) - 1,
        pages=pages,
    )


@pytest.mark.parametrize(("pages", "fits"), [(4, False), (5, True)])
def test_a_request_needs_its_tokens_a_block_and_a_page(pages: int, fits: bool) -> None:
    assert (capacity(pages).place(asked(10), LIMIT, []) == 0) is fits


def test_a_request_needs_no_more_than_its_limit() -> None:
    assert capacity(3).place(asked(10), 12, []) == 0


def test_pages_that_running_sequences_will_soon_need_are_not_given_away() -> None:
    made = capacity(11)
    made.ledgers[0].low = 8
    other = running(1, asked(10, first=50), pages=3)  # and soon 5
    assert made.place(asked(10), LIMIT, [other]) == 0
    made.ledgers[0].low = 6
    assert made.place(asked(10), LIMIT, [other]) is None


def test_the_target_with_most_pages_left_is_chosen() -> None:
    assert capacity(9, 12, 12).place(asked(10), LIMIT, []) == 1


def test_what_a_running_sequence_has_computed_need_not_fit_again() -> None:
    made = capacity(30)
    other = running(1, asked(80), pages=20)
    made.ledgers[0].low = 10
    fits = [
        made.place(request, LIMIT, [other]) == 0
        for request in (
            asked(80),
            asked(80, prefix_cache=False),
            asked(80, cache_salt="b"),
            asked(80, first=1),
        )
    ]
    assert fits == [True, False, False, False]


def test_nobody_comes_before_a_paused_sequence_of_the_same_target() -> None:
    made = capacity(100, 20)
    paused = running(1, asked(10), pages=0)
    made.pause(paused)
    assert not made.runs(paused)
    assert made.place(asked(10), LIMIT, [paused]) == 1
    made.forget(paused)
    assert made.place(asked(10), LIMIT, []) == 0


def test_the_oldest_paused_sequence_resumes_first_or_none_does() -> None:
    made = capacity(6)
    large, small = (running(i, asked(n), pages=0) for i, n in ((1, 20), (2, 4)))
    made.pause(small)
    made.pause(large)
    made.resume([large, small])
    assert (made.runs(large), made.runs(small)) == (False, False)
    made.ledgers[0].total = made.ledgers[0].low = 7
    made.resume([large, small])
    assert (made.runs(large), made.runs(small)) == (True, False)


def test_a_paused_sequence_of_a_lost_target_waits_for_it() -> None:
    made = capacity(100)
    paused = running(1, asked(10), pages=0)
    made.pause(paused)
    ledger = made.ledgers.pop(0)
    made.resume([paused])
    assert not made.runs(paused)
    made.ledgers[0] = ledger
    made.resume([paused])
    assert made.runs(paused)


def test_what_can_never_fit_is_known() -> None:
    made = capacity(4, 8)
    assert made.could_hold(32)
    assert not made.could_hold(33)
    assert not made.holds(0, 17)
    assert made.tokens == 32
