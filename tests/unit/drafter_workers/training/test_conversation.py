"""Which conversations are planned, and how one is written turn by turn."""

from itertools import islice

import pytest

from drafter_workers.training.conversation import Plan, Turn, Writing
from drafter_workers.training.plans import Frame, Style, answered, self_written

END = 2
ENDS = frozenset({END})
FRAME = Frame(before=(90, 91), answer=(END, 92), again=(END, 93))
QUESTION = Turn((90, 91, 7), limit=3, temperature=0.9, is_answer=False)
ANSWER = Turn((END, 92), limit=4, temperature=0.0, is_answer=True)


def written(turns: tuple[Turn, ...], said: list[int], max_length: int = 100) -> Writing:
    """A conversation in which the target says these tokens."""
    writing = Writing(Plan(0, 1, turns))
    for token in said:
        assert not writing.is_over
        writing.computed = len(writing.tokens)
        writing.write(token, ENDS, max_length)
    return writing


def test_turns_follow_each_other_and_answers_are_marked() -> None:
    writing = written((QUESTION, ANSWER), [11, 12, 13, 21, 22, END])
    assert writing.is_over
    assert writing.tokens == [90, 91, 7, 11, 12, 13, END, 92, 21, 22, END]
    assert writing.answers == [False] * 8 + [True] * 3


def test_an_end_that_was_written_is_not_given_again() -> None:
    writing = written((QUESTION, ANSWER), [11, END])
    assert writing.tokens == [90, 91, 7, 11, END, 92]
    assert writing.pending().tolist() == [END, 92]
    assert writing.temperature == 0.0


def test_a_turn_ends_at_its_limit_and_all_at_the_length() -> None:
    assert written((ANSWER,), [5, 5, 5, 5]).is_over
    assert written((QUESTION, ANSWER), [11, 12], max_length=5).is_over
    # What the next turn is given does not fit any more.
    full = written((QUESTION, ANSWER), [11, 12, 13], max_length=8)
    assert full.is_over and len(full.tokens) == 8


def test_a_plan_is_a_function_of_seed_and_number() -> None:
    openers = [[(5,), (6,)], [(7, 8)]]
    first = list(islice(self_written(FRAME, openers, Style(), 3), 40))
    assert first == list(islice(self_written(FRAME, openers, Style(), 3), 40))
    assert first != list(islice(self_written(FRAME, openers, Style(), 4), 40))
    assert len({plan.seed for plan in first}) == 40
    begins = {plan.turns[0].given[2:] for plan in first}
    assert begins == {(), (5,), (6,), (7, 8)}
    assert {len(plan.turns) for plan in first} == {2, 4}
    assert all(turn.is_answer == bool(i % 2) for plan in first for i, turn in enumerate(plan.turns))


def test_given_questions_are_answered_turn_by_turn() -> None:
    (plan,) = answered([[(1, 1), (3, 3)]], FRAME, Style(answer_tokens=9), 0)
    assert [turn.given for turn in plan.turns] == [(90, 91, 1, 1, 2, 92), (2, 93, 3, 3, 2, 92)]
    assert all(turn.is_answer and turn.limit == 9 for turn in plan.turns)


@pytest.mark.parametrize("seed", [0, 1])
def test_answers_take_every_temperature(seed: int) -> None:
    plans = islice(self_written(FRAME, [], Style(), seed), 60)
    seen = {turn.temperature for plan in plans for turn in plan.turns if turn.is_answer}
    assert seen == set(Style().answer_temperatures)
