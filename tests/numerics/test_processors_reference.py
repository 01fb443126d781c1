"""`process` against the plain reference, over random combinations of all fields.

Half of the cases are of numbers that float32 holds and adds without rounding: there scores and kept
tokens are equal, bit for bit. In the others scores agree to 1e-5, and the tokens that stay are held
against the reference applied to the very scores that `process` left with top_k, top_p and min_p
off. Both ways, a threshold of top_p or min_p within 1e-9 of a boundary may fall on either side of
it: what stays must then lie between what a threshold lower and higher by 1e-9 keeps. It is counted,
and must be rare. Boundaries that float64 meets exactly have cases of their own.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from protos.sampling import Bias, Processors, Sampling
from target_workers.model.history import History
from target_workers.model.processors import Context, process
from tests.reference.cases import Case, Rota, some_case
from tests.reference.processors import NEVER, best, changed, reference

SLACK = 1e-9
VOCABULARIES = (8, 9, 33, 64, 150, 301, 600)


def contexts(case: Case, *, filters: bool = True) -> list[Context | None]:
    """Rows of equal owners share a history, which has had its tokens in two or three pieces."""
    rng = np.random.default_rng(len(case.tokens))
    histories: dict[int, History] = {}
    for sampling, tokens in zip(case.samplings, case.tokens, strict=True):
        if id(tokens) in histories:
            continue
        processors = sampling.processors
        if not filters:
            processors = replace(processors, top_k=0, top_p=1.0, min_p=0.0)
        first = int(rng.integers(sampling.prompt_tokens, len(tokens) + 1))
        second = int(rng.integers(first, len(tokens) + 1))
        output = tokens[sampling.prompt_tokens : first]
        matcher = Rota(case.vocab_size, output) if processors.grammar else None
        own = replace(sampling, processors=processors)
        history = History(own, tokens[:first], case.vocab_size, matcher)
        history.commit(tokens[first:second])
        history.commit(tokens[second:])
        histories[id(tokens)] = history
    owners = zip(case.tokens, case.paths, case.plain, strict=True)
    return [None if plain else Context(histories[id(t)], path) for t, path, plain in owners]


def processed(case: Case, *, filters: bool = True) -> Tensor:
    logits = case.logits.clone()
    process(logits, contexts(case, filters=filters))
    return logits


def allowed_of(case: Case, row: int) -> set[int] | None:
    sampling = case.samplings[row]
    if not sampling.processors.grammar:
        return None
    rota = Rota(case.vocab_size, case.tokens[row][sampling.prompt_tokens :])
    return set(rota.allowed(case.paths[row]).nonzero()[0].tolist())


def kept(row: Tensor) -> set[int]:
    return set((row > NEVER).nonzero()[:, 0].tolist())


def check_kept(row: Tensor, scores: list[float], sampling: Sampling) -> bool:
    """What stays is what the reference keeps of these scores; true if a boundary is too near."""
    fewest, most = best(scores, sampling, -SLACK), best(scores, sampling, SLACK)
    found = kept(row)
    assert found == set(most[: len(found)]), "those that stay are the best"
    assert len(fewest) <= len(found) <= len(most), (len(fewest), len(found), len(most))
    if len(fewest) == len(most):
        assert found == set(best(scores, sampling))
    return len(fewest) < len(most)


def check_changed(row: Tensor, expected: list[float], logits: Tensor, sampling: Sampling) -> None:
    """Equal masks, and scores to 1e-5 of the largest number on the way to them."""
    found = row.double()
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert kept(row) == kept(wanted)
    finite = wanted > NEVER
    processors = sampling.processors
    factor = max(processors.repetition_penalty, 1 / processors.repetition_penalty)
    scale = torch.maximum(logits.double().abs() * factor, wanted.abs()).clamp(min=1.0)
    scale += abs(processors.presence_penalty) + 50 * abs(processors.frequency_penalty)
    off = ((found - wanted).abs() / scale)[finite]
    assert not finite.any() or off.max() <= 1e-5


@pytest.mark.parametrize("on_grid", [True, False])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_rows_are_those_of_the_reference(vocab_size: int, on_grid: bool) -> None:
    num_rows = near = 0
    for seed in range(150):
        case = some_case(seed, vocab_size, on_grid=on_grid)
        whole, before = processed(case), processed(case, filters=False)
        for row, sampling in enumerate(case.samplings):
            if case.plain[row]:
                assert torch.equal(whole[row], case.logits[row]), f"seed {seed}, row {row}"
                continue
            logits, history = case.logits[row], [*case.tokens[row], *case.paths[row]]
            expected = changed(logits.tolist(), sampling, history, allowed_of(case, row))
            check_changed(before[row], expected, logits, sampling)
            if on_grid:
                assert before[row].tolist() == expected, f"seed {seed}, row {row}"
            is_kept = whole[row] > NEVER
            assert torch.equal(whole[row][is_kept], before[row][is_kept]), "what stays is the same"
            near += check_kept(whole[row], before[row].tolist(), sampling)
            num_rows += 1
    assert near <= 0.05 * num_rows, f"{near} of {num_rows} near a boundary"


def test_a_row_does_not_depend_on_its_batch() -> None:
    for seed in range(60):
        case = some_case(seed, 301, on_grid=False)
        around, whole = contexts(case), processed(case)
        for row in range(len(around)):
            alone = case.logits[row : row + 1].clone()
            process(alone, around[row : row + 1])
            assert torch.equal(alone[0], whole[row]), f"seed {seed}, row {row}"
        order = torch.randperm(len(around), generator=torch.Generator().manual_seed(seed))
        shuffled = case.logits[order]
        process(shuffled, [around[i] for i in order.tolist()])
        assert torch.equal(shuffled, whole[order]), f"seed {seed}"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_so_and_touches_no_other(value: float) -> None:
    for seed in range(40):
        case = some_case(seed, 64, on_grid=False)
        whole, logits = processed(case), case.logits.clone()
        logits[0] = value
        process(logits, contexts(case))
        assert torch.equal(logits[1:], whole[1:]), f"seed {seed}"
        assert not logits[0].amax().isfinite(), f"seed {seed}"
    filters = Sampling(1.0, processors=Processors(top_k=2, top_p=0.5, min_p=0.1))
    found = one_row([3.0, value, 2.0, 1.0], filters, [0])
    assert not torch.tensor(found).amax().isfinite()


def one_row(logits: list[float], sampling: Sampling, tokens: list[int]) -> list[float]:
    row = torch.tensor([logits])
    process(row, [Context(History(sampling, tokens, len(logits)), ())])
    return row[0].tolist()


WIDE = [
    Processors(top_p=0.999),
    Processors(top_p=0.9, top_k=3000),
    Processors(min_p=0.5),
    Processors(top_k=1500, min_p=0.01),
    Processors(top_k=1),
    Processors(top_p=1e-9),
]


@pytest.mark.parametrize("processors", WIDE)
@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0])
def test_as_many_tokens_stay_as_it_takes(processors: Processors, spread: float) -> None:
    """Also where thousands do, and where all are equal."""
    for seed in range(3):
        row = np.random.default_rng(seed).normal(size=5000) * spread
        logits = np.round(row * 8) / 8 if seed else row
        sampling = Sampling(temperature=1.0, processors=processors)
        scores = torch.from_numpy(logits.astype(np.float32))
        found = torch.tensor(one_row(scores.tolist(), sampling, [0]))
        check_kept(found, scores.tolist(), sampling)


EIGHT = [0.0] * 8
EXACT = [  # thresholds that are met exactly, in any arithmetic that rounds to nearest
    (EIGHT, Processors(top_p=0.5), [0, 1, 2, 3]),
    (EIGHT, Processors(top_p=0.125), [0]),
    (EIGHT, Processors(top_p=0.126), [0, 1]),
    (EIGHT, Processors(top_k=4, top_p=0.5), [0, 1]),  # the share is of what top_k left
    (EIGHT, Processors(min_p=1.0), list(range(8))),
    ([1.0, 3.0, 2.0, 3.0], Processors(min_p=1.0), [1, 3]),
    ([1.0, 3.0, 2.0, 3.0], Processors(top_k=1), [1]),
    ([1.0, 3.0, 2.0, 3.0], Processors(top_k=3), [1, 2, 3]),
    ([2.0, 3.0, 2.0, 2.0], Processors(top_k=2), [0, 1]),
    ([0.0, NEVER, 0.0, NEVER], Processors(top_p=0.5), [0]),
    ([0.0, NEVER, 0.0, NEVER], Processors(top_k=3), [0, 2]),
    ([0.0, -2000.0, -3000.0], Processors(top_p=0.999999), [0]),
    ([0.0, -2000.0, -3000.0], Processors(), [0, 1, 2]),  # probability 0, and yet top_p is off
]


@pytest.mark.parametrize(("logits", "processors", "expected"), EXACT)
def test_thresholds_that_are_met_exactly(
    logits: list[float], processors: Processors, expected: list[int]
) -> None:
    for temperature in (0.25, 1.0, 4.0) if max(logits) == 0 else (1.0,):
        sampling = Sampling(temperature=temperature, processors=processors)
        wanted = reference(logits, sampling, [0], ())
        assert [v for v, score in enumerate(wanted) if score > NEVER] == expected
        assert one_row(logits, sampling, [0]) == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_that_the_vocabulary_does_not_have_change_nothing(temperature: float) -> None:
    """A drafter may know fewer tokens than the request and its history name."""
    processors = Processors(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        bias=(Bias(70, 9.0), Bias(3, 1.0)),
        allowed=(0, 1, 3, 4, 5, 71),
        withheld=(1, 72),
        min_tokens=9,
        no_repeat_ngram=2,
    )
    sampling = Sampling(temperature, processors=processors, prompt_tokens=1)
    tokens, path = [70, 3, 5, 71, 3], (74, 5, 70, 3)
    logits = [float(v % 5) for v in range(8)]
    history = History(sampling, tokens[:2], 8)
    history.commit(tokens[2:])
    row = torch.tensor([logits])
    process(row, [Context(history, path)])
    assert row[0].tolist() == reference(logits, sampling, tokens, path)
    assert kept(row[0]) == {0, 3, 4}


def test_masks_may_leave_nothing_but_filters_never_do() -> None:
    for temperature in (0.0, 1e-6, 1.0):
        nothing = Sampling(temperature, processors=Processors(allowed=(2,), no_repeat_ngram=1))
        assert one_row([1.0, 2.0, 3.0], nothing, [2]) == [NEVER] * 3
        least = Sampling(temperature, processors=Processors(top_k=1, top_p=1e-12, min_p=1.0))
        assert one_row([1.0, 2.0, 2.0], least, [0])[1] == 2.0


def test_a_path_counts_as_output_and_leaves_the_history_as_it_was() -> None:
    """min_tokens, counts and n-grams go on along the guesses, and are forgotten with them."""
    processors = Processors(
        frequency_penalty=1.0, withheld=(7,), min_tokens=3, no_repeat_ngram=2, presence_penalty=0.5
    )
    sampling = Sampling(processors=processors, prompt_tokens=2)
    tokens = [1, 2, 3]
    history = History(sampling, tokens, 8)
    paths = [(), (4,), (4, 2), (4, 2, 2), (1,), ()]
    for _ in range(2):
        rows = torch.zeros(len(paths), 8)
        process(rows, [Context(history, path) for path in paths])
        expected = [reference([0.0] * 8, sampling, tokens, path) for path in paths]
        assert rows.tolist() == expected
    assert [7 in kept(row) for row in rows] == [False, False, True, True, False, False]
    assert 3 not in kept(rows[2]), "2 3 was in the history"
