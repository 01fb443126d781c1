"""What goes into a step, and when it waits."""

import random

from orchestrator.request import Mode, Request
from orchestrator.scheduler import Budget, Pick, Wait, parents, wait_until
from orchestrator.scheduler import plan as plan_within
from orchestrator.sequence import Sequence
from protos.draft_tree import DraftTree


class Never:
    """A stopper that never stops."""

    def push(self, token: int) -> bool:
        return False


def sequence(seq: int, *, tokens: int = 4, cached: int = 3, guesses: int = 0, **fields) -> Sequence:
    fields.setdefault("pages", -(-cached // 4))
    tree = DraftTree(tokens)
    node = None
    for token in range(guesses):
        node = tree.add(node, token)
        node.scores["drafter"] = -0.1
    return Sequence(
        seq=seq,
        request=Request(str(seq), (1,) * tokens, max_tokens=100),
        mode=fields.pop("mode", Mode.ASYNC),
        target=0,
        stopper=Never(),
        tokens=[1] * tokens,
        limit=fields.pop("limit", 104),
        tree=tree,
        deadline=1e9,
        cached=cached,
        **fields,
    )


def plan(seqs, rows, wanted, shape) -> list[Pick]:
    """With more pages than are of use."""
    return plan_within(seqs, Budget(rows, 1000, 4), wanted, shape)


def test_every_decoding_sequence_gets_a_row_before_any_gets_guesses() -> None:
    seqs = [sequence(i, guesses=4) for i in range(3)]
    picks = plan(seqs, rows=5, wanted=lambda seq: 4, shape="chain")
    assert [len(p.nodes) for p in picks] == [2, 0, 0]
    assert [p.clamp for p in picks] == ["rows", "rows", "rows"]


def test_rows_too_few_for_all_go_to_the_least_recently_served() -> None:
    seqs = [sequence(i, last_step=10 - i) for i in range(4)]
    picks = plan(seqs, rows=2, wanted=lambda seq: 0, shape="chain")
    assert [p.seq.seq for p in picks] == [3, 2]


def test_a_long_prompt_takes_only_what_rows_are_left() -> None:
    prompt = sequence(1, tokens=50, cached=0)
    running = sequence(2, guesses=3)
    picks = plan([prompt, running], rows=20, wanted=lambda seq: 3, shape="chain")
    assert [(p.seq.seq, p.end, len(p.nodes)) for p in picks] == [(2, 4, 3), (1, 16, 0)]


def test_a_prompt_that_ends_in_this_step_is_verified_along() -> None:
    prompt = sequence(1, tokens=5, cached=0, guesses=3)
    (pick,) = plan([prompt], rows=20, wanted=lambda seq: 2, shape="chain")
    assert (pick.end, len(pick.nodes)) == (5, 2)


def test_the_last_token_is_never_drafted() -> None:
    (pick,) = plan([sequence(1, guesses=8, limit=8)], 20, lambda seq: 8, "chain")
    assert len(pick.nodes) == 3
    assert pick.clamp == "length"


def test_a_shortage_of_guesses_is_named() -> None:
    (pick,) = plan([sequence(1, guesses=2)], 20, lambda seq: 4, "chain")
    assert (len(pick.nodes), pick.clamp) == (2, "draft")


def test_guesses_shrink_before_a_committed_row_goes_without_a_page() -> None:
    first, second = (sequence(i, tokens=4, cached=3, guesses=8) for i in (1, 2))
    picks = plan_within([first, second], Budget(100, 1, 4), lambda seq: 6, "chain")
    assert [(len(p.nodes), p.clamp) for p in picks] == [(4, "pages"), (0, "pages")]


def test_guesses_leave_a_prompt_its_pages() -> None:
    decoding, prompt = sequence(1, guesses=8), sequence(2, tokens=10, cached=0)
    picks = plan_within([decoding, prompt], Budget(100, 4, 4), lambda seq: 8, "chain")
    assert [(p.seq.seq, p.end, len(p.nodes)) for p in picks] == [(1, 4, 4), (2, 10, 0)]


def test_the_place_of_old_guesses_is_free_again() -> None:
    seq = sequence(1, tokens=5, cached=4, guesses=3, pages=3)
    budget = Budget(100, 0, 4)
    (pick,) = plan_within([seq], budget, lambda seq: 8, "chain")
    assert (len(pick.nodes), budget.pages) == (3, 1)


def test_a_row_that_finds_no_page_waits_and_the_others_go_on() -> None:
    whole, partly = sequence(1, tokens=5, cached=4), sequence(2, tokens=4, cached=3)
    picks = plan_within([whole, partly], Budget(100, 0, 4), lambda seq: 0, "chain")
    assert [p.seq.seq for p in picks] == [2]


def test_a_prompt_is_computed_as_far_as_there_are_pages() -> None:
    prompt = sequence(1, tokens=50, cached=0)
    (pick,) = plan_within([prompt], Budget(100, 3, 4), lambda seq: 4, "chain")
    assert (pick.end, pick.nodes) == (12, ())


def test_no_step_takes_more_than_its_budget() -> None:
    draw = random.Random(3)
    for _ in range(300):
        seqs = [
            sequence(i, tokens=cached + more, cached=cached, guesses=draw.randrange(9))
            for i in range(draw.randrange(1, 6))
            for cached, more in [(draw.randrange(20), draw.choice((1, 1, draw.randrange(1, 30))))]
        ]
        for seq in seqs:
            if seq.pending == 1:
                seq.pages += draw.randrange(2)
        rows, pages = draw.randrange(1, 40), draw.randrange(12)
        picks = plan_within(seqs, Budget(rows, pages, 4), lambda seq: 8, "chain")
        assert sum(p.end + len(p.nodes) - p.seq.cached for p in picks) <= rows
        assert sum(-(-(p.end + len(p.nodes)) // 4) - p.seq.pages for p in picks) <= pages


def test_parents_index_the_selection() -> None:
    seq = sequence(1, guesses=3)
    (pick,) = plan([seq], 20, lambda s: 3, "chain")
    assert parents(pick.nodes) == [-1, 0, 1]


def wait(seqs: list[Sequence], waits: dict[int, Wait | None]) -> float:
    return wait_until(seqs, lambda seq: waits[seq.seq])


def test_a_step_waits_only_if_no_sequence_has_a_draft() -> None:
    empty, ready = sequence(1), sequence(2, guesses=1)
    waits = {1: Wait(1, 5.0), 2: Wait(1, 6.0)}
    assert wait([empty], waits) == 5.0
    assert wait([empty, ready], waits) == 0.0


def test_a_due_prefill_or_a_plain_sequence_never_waits() -> None:
    empty = sequence(1)
    prefill, plain = sequence(2, cached=0), sequence(3, mode=Mode.OFF)
    waits = {1: Wait(1, 5.0), 2: Wait(1, 6.0), 3: None}
    assert wait([empty, prefill], waits) == 0.0
    assert wait([empty, plain], waits) == 0.0


def test_synchronous_sequences_wait_for_each_whole_block() -> None:
    half, whole = (sequence(i, mode=Mode.SYNC, guesses=n) for i, n in ((1, 2), (2, 4)))
    waits = {1: Wait(4, 5.0), 2: Wait(4, 6.0)}
    assert wait([half, whole], waits) == 5.0
    assert wait([whole], waits) == 0.0
