"""What processors go by grows with the sequence and is the same however it came to be."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from protos.sampling import Bias, Processors, Sampling
from target_workers.model.history import History
from target_workers.model.ngrams import Ngrams

VOCAB = 8


class NeverTwice:
    """A grammar by which no token follows itself; remembers what was committed."""

    def __init__(self) -> None:
        self.output: list[int] = []

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        mask = np.ones(VOCAB, np.bool_)
        mask[[*self.output, *path][-1:]] = False
        return mask

    def commit(self, tokens: Sequence[int]) -> None:
        self.output += tokens


def history_of(
    tokens: Sequence[int], asked: Processors, prompt: int = 0, vocab: int = VOCAB
) -> History:
    return History(Sampling(processors=asked, prompt_tokens=prompt), tokens, vocab)


def effects(history: History, path: Sequence[int] = ()) -> dict[int, tuple[float, ...]]:
    """What happens to each token: the path overrides what was committed."""
    assert history.penalties is not None
    found = {}
    for ids, table in (history.penalties.entries, history.penalties.after(path)):
        found |= dict(zip(ids.tolist(), map(tuple, table.T.tolist()), strict=True))
    return found


def excluded(history: History, path: Sequence[int] = ()) -> list[int]:
    return sorted(history.excluded(path).tolist())


def repeats_by_definition(tokens: Sequence[int], length: int) -> set[int]:
    """Every token that, put after these, would end a run that they contain."""
    runs = {tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)}
    end = tuple(tokens[len(tokens) - length + 1 :])
    return {token for token in range(VOCAB) if (*end, token) in runs and len(end) == length - 1}


ALL = Processors(
    repetition_penalty=1.3,
    presence_penalty=0.25,
    frequency_penalty=0.1,
    bias=(Bias(2, 1.5), Bias(7, -3.0)),
    withheld=(0, 5),
    min_tokens=9,
    no_repeat_ngram=3,
)


def test_tokens_count_as_output_only_after_the_prompt() -> None:
    history = history_of([3, 3, 4, 3], ALL, prompt=3)
    assert effects(history) == {
        2: (1.0, 0.0, 0.0, 1.5),
        7: (1.0, 0.0, 0.0, -3.0),
        3: (1.3, 0.25, 0.1, 0.0),
        4: (1.3, 0.0, 0.0, 0.0),
    }


def test_a_path_token_counts_once_more_each_time() -> None:
    history = history_of([3, 3, 4, 3], ALL, prompt=2)
    found = effects(history, (3, 2, 3))
    assert found[3] == (1.3, 0.25, 0.1 * 3, 0.0)
    assert found[2] == (1.3, 0.25, 0.1, 1.5)
    assert effects(history)[3] == (1.3, 0.25, 0.1, 0.0), "a guess leaves no trace"


def test_a_path_token_of_the_prompt_becomes_output() -> None:
    history = history_of([3, 3, 4], ALL, prompt=3)
    assert effects(history)[4] == (1.3, 0.0, 0.0, 0.0)
    assert effects(history, (4,))[4] == (1.3, 0.25, 0.1, 0.0)


def test_without_a_repetition_penalty_the_prompt_is_not_listed() -> None:
    history = history_of([3, 4, 5], Processors(presence_penalty=0.5), prompt=2)
    assert effects(history) == {5: (1.0, 0.5, 0.0, 0.0)}


def test_biases_of_one_token_add_up_and_need_no_history() -> None:
    history = history_of([1, 2, 3], Processors(bias=(Bias(4, 1.0), Bias(4, 0.5))))
    history.commit([4, 4])
    assert effects(history, (5,)) == {4: (1.0, 0.0, 0.0, 1.5)}


def test_what_has_no_logits_is_history_all_the_same() -> None:
    asked = Processors(
        presence_penalty=1.0,
        bias=(Bias(VOCAB, 2.0),),
        allowed=(1, VOCAB),
        withheld=(VOCAB + 1,),
        min_tokens=9,
        no_repeat_ngram=2,
    )
    history = history_of([3, VOCAB, 4, VOCAB, 9, 3], asked)
    assert effects(history, (VOCAB,)).keys() == {3, 4}
    assert history.allowed is not None and history.allowed.tolist() == [1]
    assert excluded(history, (VOCAB,)) == [4], "9 may not follow either, but is no token here"


def test_only_what_is_asked_for_is_kept() -> None:
    history = history_of([1, 2, 1, 2], Processors(top_k=3))
    history.commit([1, 2])
    assert history.penalties is None and history.allowed is None
    assert excluded(history, (1,)) == []


def test_more_distinct_tokens_than_there_was_room_for() -> None:
    history = history_of([], Processors(frequency_penalty=1.0), vocab=1000)
    for start in range(0, 900, 7):
        history.commit(range(start, min(start + 7, 900)))
    history.commit(range(500))
    ones, twos = dict.fromkeys(range(900), 1.0), dict.fromkeys(range(500), 2.0)
    assert {token: effect[2] for token, effect in effects(history).items()} == ones | twos


@pytest.mark.parametrize("committed", range(6))
def test_min_tokens_counts_the_output_along_the_path(committed: int) -> None:
    history = history_of([1, 1, 1], Processors(withheld=(0, 5), min_tokens=3), prompt=3)
    history.commit([2] * committed)
    for guessed in range(6):
        expected = [0, 5] if committed + guessed < 3 else []
        assert excluded(history, (2,) * guessed) == expected


def test_withheld_tokens_do_not_wait_for_the_prompt() -> None:
    history = history_of([1], Processors(withheld=(5,), min_tokens=1), prompt=3)
    history.commit([1, 1])
    assert excluded(history) == [5]
    history.commit([1])
    assert excluded(history) == []


def test_a_run_may_form_across_the_border_of_path_and_history() -> None:
    history = history_of([1, 2], Processors(no_repeat_ngram=3))
    assert excluded(history, (3, 1)) == []
    assert excluded(history, (3, 1, 2)) == [3]


def test_a_run_may_form_within_the_path_alone() -> None:
    history = history_of([], Processors(no_repeat_ngram=3))
    assert excluded(history, (4, 5, 6, 4, 5)) == [6]
    assert excluded(history) == [], "a guess leaves no trace"


def test_runs_of_one_token_forbid_all_that_was_there() -> None:
    history = history_of([1, 2], Processors(no_repeat_ngram=1), prompt=1)
    assert excluded(history, (5, 5)) == [1, 2, 5]


def test_runs_longer_than_the_history_forbid_nothing() -> None:
    assert excluded(history_of([1, 1], Processors(no_repeat_ngram=9)), (1, 1)) == []


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
def test_repeats_are_those_of_the_definition(length: int) -> None:
    dice = random.Random(length)
    for _ in range(200):
        tokens = [dice.randrange(3) for _ in range(dice.randrange(20))]
        runs, at = Ngrams(length), dice.randrange(len(tokens) + 1)
        for token in tokens[:at]:
            runs.commit([token])
        assert runs.repeats(tokens[at:]) == repeats_by_definition(tokens, length)


@pytest.mark.parametrize("prompt", [0, 1, 11, 25])
def test_committed_in_parts_equals_built_anew(prompt: int) -> None:
    dice = random.Random(prompt)
    for _ in range(50):
        tokens = [dice.randrange(VOCAB + 1) for _ in range(25)]
        path = tuple(dice.randrange(VOCAB) for _ in range(dice.randrange(6)))
        anew, grown = history_of(tokens, ALL, prompt), history_of([], ALL, prompt)
        while tokens:
            count = dice.randint(1, 6)
            grown.commit(tokens[:count])
            grown.excluded(path), effects(grown, path)  # what is asked changes nothing
            tokens = tokens[count:]
        assert effects(grown) == effects(anew)
        assert effects(grown, path) == effects(anew, path)
        assert excluded(grown, path) == excluded(anew, path)


def test_a_path_is_as_good_as_committed() -> None:
    dice = random.Random(7)
    for _ in range(100):
        tokens = [dice.randrange(VOCAB) for _ in range(12)]
        at = dice.randint(4, 12)
        guessed, known = history_of(tokens[:at], ALL, 4), history_of(tokens, ALL, 4)
        assert effects(guessed, tokens[at:]) == effects(known)
        assert excluded(guessed, tokens[at:]) == excluded(known)


def test_the_grammar_is_told_of_output_alone() -> None:
    matcher = NeverTwice()
    History(Sampling(prompt_tokens=2), [1, 2, 3], VOCAB, matcher)
    assert matcher.output == [], "it was made knowing them"
    history = History(Sampling(prompt_tokens=3), [1], VOCAB, matcher)
    history.commit([2, 3, 4])
    history.commit([5])
    assert matcher.output == [4, 5]
