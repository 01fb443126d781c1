"""What sequences of a target engine share, over a model whose cache tells wrong rows from right."""

from collections.abc import Sequence

import pytest

from protos.messages import Extend, Held, StepClose, StepOpen, TreeNode
from protos.sampling import GREEDY, Sampling
from tests.driver import Driver
from tests.duo import audit, counts
from tests.script_lm import ScriptLM, Shape, ref_decode, script_target

LM = ScriptLM(vocab=16, seed=3)
PROMPT = tuple(range(1, 14))
SHAPE = Shape(page_size=4, num_pages=16)


class Serving(Driver):
    """Over the scripted model, whose answers it knows."""

    def __init__(self, shape: Shape = SHAPE, broken: Sequence[int] = ()) -> None:
        super().__init__(script_target(LM, shape, broken))

    def serve(self, seq: int, tokens: Sequence[int] = PROMPT, **fields) -> int:
        """Open, compute what is not cached, and close; how many tokens were cached."""
        found = self.open(seq, tokens, **fields)
        verdict = self.extend(seq, found, tokens[found:])
        assert verdict.next_token == LM.choose(tokens), verdict
        self.close(seq)
        return found


def chain(*tokens: int) -> tuple[TreeNode, ...]:
    return tuple(TreeNode(i - 1, token) for i, token in enumerate(tokens))


@pytest.mark.parametrize("length", range(1, 14))
def test_whole_pages_are_found_but_never_the_last_token(length: int) -> None:
    driver = Serving()
    assert driver.serve(1, PROMPT[:length]) == 0
    assert driver.serve(2, PROMPT[:length]) == (length - 1) // 4 * 4
    assert counts(driver.engine)["found"] == (length - 1) // 4 * 4


def test_a_prefix_is_shared_with_whatever_follows_it() -> None:
    driver = Serving()
    driver.serve(1, PROMPT)
    assert driver.serve(2, (*PROMPT[:8], 0, 0, 0, 0, 0)) == 8
    assert driver.serve(3, (*PROMPT[:7], 0, 0, 0)) == 4
    assert driver.serve(4, (0, *PROMPT[1:])) == 0


def test_another_sampling_shares_but_another_salt_does_not() -> None:
    driver = Serving()
    driver.serve(1, PROMPT, cache_salt="a")
    assert driver.open(2, PROMPT) == 0
    assert driver.open(3, PROMPT, cache_salt="b") == 0
    opened = StepOpen(4, PROMPT, Sampling(0.8, 5), cache_salt="a")
    assert driver.send([opened]).cached == (12,)


def test_a_sequence_without_prefix_cache_neither_takes_nor_gives() -> None:
    driver = Serving()
    driver.serve(1, PROMPT, prefix_cache=False)
    assert audit(driver.engine).cached_pages == 0
    assert driver.serve(2, PROMPT) == 0
    assert driver.serve(3, PROMPT, prefix_cache=False) == 0
    assert driver.serve(4, PROMPT) == 12


def test_an_open_with_an_extend_takes_nothing() -> None:
    driver = Serving()
    driver.serve(1, PROMPT)
    opens = [StepOpen(2, PROMPT, GREEDY), StepOpen(3, PROMPT, GREEDY)]
    stepped = driver.send(opens, [Extend(2, 0, PROMPT)])
    assert stepped.cached == (0, 12)
    assert stepped.verdicts[0].next_token == LM.choose(PROMPT)


def test_the_first_extend_starts_where_cached_says() -> None:
    driver = Serving()
    driver.serve(1, PROMPT)
    assert driver.open(2, PROMPT) == 12
    assert "starts at 0, 12 rows are cached" in driver.extend(2, 0, PROMPT).error


def test_pages_are_shared_while_their_sequence_runs() -> None:
    driver = Serving()
    driver.open(1, PROMPT)
    first = driver.extend(1, 0, PROMPT).next_token
    assert driver.open(2, PROMPT) == 12
    assert audit(driver.engine).shared_pages == 3
    assert driver.extend(2, 12, PROMPT[12:]).next_token == first
    driver.send(closes=[StepClose(1)])
    # The other goes on over pages that it alone holds now.
    after = driver.extend(2, 13, (first,))
    assert after.next_token == LM.choose((*PROMPT, first))


def test_a_prefill_chunk_is_shared_as_soon_as_it_is_computed() -> None:
    driver = Serving()
    driver.open(1, PROMPT)
    driver.send([], [Extend(1, 0, PROMPT[:9])])
    assert driver.open(2, PROMPT) == 8


def test_the_open_of_a_step_finds_what_its_close_gives() -> None:
    driver = Serving()
    driver.open(1, PROMPT[:5])
    verdict = driver.extend(1, 0, PROMPT[:5], chain(*ref_decode(LM, PROMPT[:5], 3)))
    text = (*PROMPT[:5], *ref_decode(LM, PROMPT[:5], 4))
    stepped = driver.send([StepOpen(2, text, GREEDY)], closes=[StepClose(1, verdict.walk)])
    assert (stepped.cached, stepped.free_pages) == ((8,), 14)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_only_kept_guesses_get_into_the_cache(kept: int) -> None:
    """Cases B058, B059: nothing after a stop, nothing rejected, nothing merely guessed."""
    driver = Serving()
    right = ref_decode(LM, PROMPT[:5], 12)
    # A tree: the right path is not in its place until it has been kept.
    nodes = (TreeNode(-1, (right[0] + 1) % 16), TreeNode(-1, right[0]))
    nodes += (TreeNode(1, right[1]), TreeNode(2, right[2]), TreeNode(3, (right[3] + 1) % 16))
    driver.open(1, PROMPT[:5])
    verdict = driver.extend(1, 0, PROMPT[:5], nodes)
    assert verdict.walk == (1, 2, 3)
    assert driver.open(2, (*PROMPT[:5], *right)) == 4, "before its guesses are kept"
    driver.send(closes=[StepClose(1, verdict.walk[:kept]), StepClose(2)])
    whole = (*PROMPT[:5], *right)
    assert driver.open(3, whole) == (5 + kept) // 4 * 4
    found = driver.open(4, whole)
    assert driver.extend(4, found, whole[found:]).next_token == LM.choose(whole)


def test_rejected_rows_are_found_by_nobody() -> None:
    driver = Serving()
    driver.open(1, PROMPT[:4])
    wrong = (LM.choose(PROMPT[:4]) + 1) % 16
    assert driver.extend(1, 0, PROMPT[:4], chain(wrong, 1, 1, 1)).walk == ()
    driver.send(closes=[StepClose(1)])
    assert driver.open(2, (*PROMPT[:4], wrong, 1, 1, 1, 1)) == 4


def test_rows_with_logits_that_are_not_finite_are_not_shared() -> None:
    driver = Serving(broken=[5])
    driver.open(1, PROMPT[:5])
    driver.send([], [Extend(1, 0, PROMPT[:5])])
    driver.send(closes=[StepClose(1)])
    assert driver.open(2, PROMPT) == 0


def test_a_growing_sequence_evicts_what_has_not_been_used_for_longest() -> None:
    driver = Serving(Shape(page_size=4, num_pages=6))
    driver.serve(1, (1,) * 9)
    driver.serve(2, (2,) * 9)
    assert audit(driver.engine).cached_pages == 4
    driver.serve(3, (3,) * 16)
    assert driver.serve(4, (2,) * 9) == 8
    assert driver.serve(5, (1,) * 9) == 0


def test_free_pages_count_what_can_be_evicted() -> None:
    driver = Serving()
    driver.open(1, PROMPT)
    assert driver.send([], [Extend(1, 0, PROMPT)]).free_pages == 12
    assert driver.send(closes=[StepClose(1)]).free_pages == 16
    assert driver.send([StepOpen(2, PROMPT, GREEDY)]).free_pages == 13
    reply = audit(driver.engine)
    assert (reply.free_pages, reply.cached_pages, reply.held) == (13, 0, (Held(2, 12, 3),))


def test_a_lost_page_is_noticed_when_no_sequence_is_open() -> None:
    driver = Serving()
    driver.open(1, PROMPT)
    driver.engine._pages._free.pop()
    with pytest.raises(AssertionError, match="1 pages are lost"):
        driver.send(closes=[StepClose(1)])


def test_a_reset_forgets_the_cache() -> None:
    driver = Serving()
    driver.serve(1, PROMPT)
    driver.reset()
    assert driver.serve(1, PROMPT) == 0
