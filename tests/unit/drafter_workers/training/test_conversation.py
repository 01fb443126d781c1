"""Which conversations are planned, and how one is written turn by turn."""

from itertools import islice

import pytest

from drafter_workers.training.conversation import Plan, Turn, Writing
from drafter_workers.training.openers import OPENERS
from drafter_workers.training.plans import Frame, Style, answered, self_written

END = 2
ENDS = frozenset({END})
FRAME = Frame(before=(90, 91), answer=(END, 92), again=(END, 93))
QUESTION = Turn((90, 91, 7), limit=3, temperature=0.9, is_answer=False)
ANSWER = Turn((END, 92), limit=4, temperature=0.0, is_answer=True)


def written(turns: tuple[Turn, ...], said: list[int], max_length: int = 100) -> Writing:
    """A conversation in which the target says these tokens."""
    writing = Writing(Plan(0, 1, turns), max_length)
    for token in said:
        assert not writing.is_over
        writing.computed = len(writing.tokens)
        writing.write(token, ENDS)
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
    assert writing.num_pending == 2
    assert writing.temperature == 0.0


def test_a_turn_ends_at_its_limit_and_all_at_the_length() -> None:
    assert written((ANSWER,), [5, 5, 5, 5]).is_over
    assert written((QUESTION, ANSWER), [11, 12], max_length=5).tokens == [90, 91, 7, 11, 12]
    assert written((QUESTION, ANSWER), [11, 12], max_length=5).is_over


@pytest.mark.parametrize("max_length", [7, 8])
def test_what_is_given_without_room_for_an_answer_is_not_given(max_length: int) -> None:
    full = written((QUESTION, ANSWER), [11, 12, 13], max_length)
    assert full.is_over
    assert full.tokens == [90, 91, 7, 11, 12, 13]
    assert full.answers == [False] * 6


def test_room_for_one_token_is_enough() -> None:
    writing = written((QUESTION, ANSWER), [11, 12, 13], max_length=9)
    assert not writing.is_over
    writing.write(21, ENDS)
    assert writing.is_over
    assert writing.tokens == [90, 91, 7, 11, 12, 13, END, 92, 21]


def test_a_conversation_that_begins_too_long_is_over_before_it_starts() -> None:
    assert Writing(Plan(0, 1, (QUESTION,)), 3).is_over
    assert not Writing(Plan(0, 1, (QUESTION,)), 4).is_over


@pytest.mark.parametrize("turns", [(), (Turn((), 1, 0.0, is_answer=True),)])
def test_a_plan_gives_something_to_go_on_from(turns: tuple[Turn, ...]) -> None:
    with pytest.raises(AssertionError, match="goes on from something"):
        Plan(0, 1, turns)


def test_a_turn_is_of_a_token_at_least() -> None:
    with pytest.raises(AssertionError, match="a token of every turn"):
        Turn((1,), 0, 0.0, is_answer=True)
    with pytest.raises(ValueError, match="a token at least"):
        Style(answer_tokens=0)
    with pytest.raises(ValueError, match="0 or more"):
        Style(answer_temperatures=(0.0, -0.1))


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


def test_a_plan_does_not_depend_on_how_many_are_asked_for() -> None:
    openers = [[(5,), (6,)], [(7, 8)]]
    late = next(islice(self_written(FRAME, openers, Style(), 3), 25, None))
    assert late.number == 25
    assert late == list(islice(self_written(FRAME, openers, Style(), 3), 40))[25]
    prompts = [[(n, n)] for n in range(9)]
    few = list(answered(prompts[:4], FRAME, Style(), 3))
    assert few == list(answered(prompts, FRAME, Style(), 3))[:4]


def test_every_kind_of_question_is_as_likely_whatever_its_openers() -> None:
    openers = [[(10 + i,) for i in range(9)], [(50,)]]
    begins = [
        plan.turns[0].given[2:] for plan in islice(self_written(FRAME, openers, Style(), 0), 2000)
    ]
    share = begins.count((50,)) / (len(begins) - begins.count(()))
    assert 0.45 < share < 0.55, "not one in ten"


def test_openers_cover_the_kinds_of_prompts() -> None:
    assert set(OPENERS) == {
        "chat", "code", "maths", "extraction", "summary", "translation", "rewriting", "questions"
    }  # fmt: skip
    texts = [text for kind in OPENERS.values() for text in kind]
    assert all(text.strip() for text in texts)
    assert len(set(texts)) == len(texts)


def test_given_questions_are_answered_turn_by_turn() -> None:
    (plan,) = answered([[(1, 1), (3, 3)]], FRAME, Style(answer_tokens=9), 0)
    assert [turn.given for turn in plan.turns] == [(90, 91, 1, 1, 2, 92), (2, 93, 3, 3, 2, 92)]
    assert all(turn.is_answer and turn.limit == 9 for turn in plan.turns)
    assert len({turn.temperature for turn in plan.turns}) == 1, "one for all of a conversation"
    several = list(answered([[(n,)] for n in range(20)], FRAME, Style(), 0))
    assert [plan.number for plan in several] == list(range(20))
    assert len({plan.seed for plan in several}) == 20


@pytest.mark.parametrize("seed", [0, 1])
def test_answers_take_every_temperature(seed: int) -> None:
    plans = islice(self_written(FRAME, [], Style(), seed), 60)
    seen = {turn.temperature for plan in plans for turn in plan.turns if turn.is_answer}
    assert seen == set(Style().answer_temperatures)
