"""Processors by hand at their edges, and each row equal to itself in every company."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protos.sampling import Bias, Processors, Sampling
from target_workers.model.history import History
from target_workers.model.processors import Context, process

INF = math.inf


class Listed:
    """A grammar that allows some tokens, and after a path also its last one."""

    def __init__(self, vocab: int, tokens: Sequence[int]) -> None:
        self._vocab, self._tokens = vocab, tokens

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab, np.bool_)
        allowed = (*self._tokens, *path[-1:])
        mask[[token for token in allowed if token < self._vocab]] = True
        return mask

    def commit(self, tokens: Sequence[int]) -> None:
        raise AssertionError("nothing is committed by a guess")


def context_of(
    asked: Processors,
    tokens: Sequence[int] = (),
    path: tuple[int, ...] = (),
    *,
    vocab: int = 8,
    temperature: float = 1.0,
    matcher: Listed | None = None,
) -> Context:
    sampling = Sampling(temperature=temperature, processors=asked)
    return Context(History(sampling, tokens, vocab, matcher), path)


def processed(logits: Sequence[float], context: Context) -> list[float]:
    row = torch.tensor([logits], dtype=torch.float32)
    process(row, [context])
    found: list[float] = row[0].tolist()
    return found


def test_penalties_and_bias_come_in_order() -> None:
    asked = Processors(2.0, 0.5, 0.25, (Bias(1, 10.0), Bias(3, -1.0)))
    context = context_of(asked, [0, 1, 1], (2, 1))
    row = processed([4.0, 4.0, -4.0, 4.0, 0.0, -1.0, 1.0, 0.0], context)
    assert row == [
        4 / 2 - 0.5 - 0.25,
        4 / 2 - 0.5 - 3 * 0.25 + 10,
        -4 * 2 - 0.5 - 0.25,
        4 - 1,
        *(0.0, -1.0, 1.0, 0.0),
    ]


def test_a_repetition_penalty_also_minds_the_prompt() -> None:
    sampling = Sampling(processors=Processors(repetition_penalty=2.0), prompt_tokens=2)
    row = processed([1.0] * 8, Context(History(sampling, [0, 1, 2], 8), (3,)))
    assert row == [0.5] * 4 + [1.0] * 4


def test_the_rows_of_a_tree_each_have_their_own_path() -> None:
    history = context_of(Processors(frequency_penalty=1.0), [0]).history
    paths: list[tuple[int, ...]] = [(), (0,), (0, 0), (1,), (1, 2)]
    rows = torch.zeros(len(paths), 8)
    process(rows, [Context(history, path) for path in paths])
    assert rows[:, :4].tolist() == [
        [-1, 0, 0, 0],
        [-2, 0, 0, 0],
        [-3, 0, 0, 0],
        [-1, -1, 0, 0],
        [-1, -1, -1, 0],
    ]


def test_allowed_withheld_runs_and_grammar_together() -> None:
    asked = Processors(allowed=(1, 2, 3, 4, 5), withheld=(1,), min_tokens=9, no_repeat_ngram=2)
    context = context_of(asked, [6, 2, 6], (7, 6), matcher=Listed(8, [0, 1, 2, 3, 4]))
    row = processed([0.0] * 8, context)
    assert [token for token in range(8) if row[token] > -INF] == [3, 4]


def test_the_grammar_sees_the_path() -> None:
    context = context_of(Processors(), [], (5,), matcher=Listed(8, [2]))
    assert [value > -INF for value in processed([0.0] * 8, context)].index(True) == 2
    assert processed([0.0] * 8, context)[5] == 0.0


def test_masks_may_leave_nothing_and_trouble_nobody() -> None:
    asked = Processors(allowed=(3,), withheld=(3,), min_tokens=1, top_k=2, top_p=0.5, min_p=0.1)
    rows = torch.arange(16.0).view(2, 8)
    process(rows, [context_of(asked), context_of(replace(asked, allowed=(3, 4)))])
    assert rows[0].tolist() == [-INF] * 8
    assert rows[1].tolist() == [-INF] * 4 + [12.0] + [-INF] * 3


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_rows_that_are_not_finite_are_left_for_the_chooser(bad: float) -> None:
    asked = Processors(2.0, 1.0, 1.0, (Bias(0, 3.0),), allowed=(0, 1), top_k=1, top_p=0.5)
    rows = torch.ones(2, 8)
    rows[0, 5] = bad
    before = rows.clone()
    process(rows, [context_of(asked, [0, 1]), context_of(asked, [0, 1])])
    assert torch.equal(rows[0].nan_to_num(9), before[0].nan_to_num(9))
    assert rows[1].isfinite().sum() == 1


def test_no_penalty_takes_a_token_away_or_brings_one_back() -> None:
    asked = Processors(repetition_penalty=1e-30, bias=(Bias(2, 1e300), Bias(3, -1e300)))
    row = processed([1e20, -1e20, 0, 0, -INF, 0, 0, 0], context_of(asked, [0, 1, 4]))
    assert row[4] == -INF
    assert all(math.isfinite(value) for token, value in enumerate(row) if token != 4)
    assert row[0] == row[2] == torch.finfo(torch.float32).max


def test_ids_beyond_the_vocabulary_stay_impossible() -> None:
    asked = Processors(2.0, 1.0, 1.0, (Bias(6, 50.0),), allowed=(1, 6), top_p=0.999)
    context = context_of(asked, [6, 1], (7,), vocab=5, matcher=Listed(5, [0, 1]))
    assert processed([1.0] * 5 + [-INF] * 3, context) == [-INF, -0.5 - 1, *[-INF] * 6]


KINDS = (
    Processors(repetition_penalty=1.1),
    Processors(presence_penalty=0.3, frequency_penalty=0.7),
    Processors(bias=(Bias(2, 0.1), Bias(5, -0.3))),
    Processors(allowed=(1, 2, 3, 5, 7)),
    Processors(withheld=(1, 4), min_tokens=3),
    Processors(no_repeat_ngram=2),
    Processors(top_k=3),
    Processors(top_k=40, top_p=0.8),
    Processors(top_k=400, top_p=0.9),
    Processors(top_p=0.95),
    Processors(top_p=0.999, min_p=1e-6),
    Processors(min_p=0.02),
    Processors(1.2, 0.1, 0.2, (Bias(3, 1.0),), (), (6,), 5, 3, "", 50, 0.9, 0.01),
)


def company(vocab: int, generator: np.random.Generator) -> Iterator[Context | None]:
    """Rows of every kind, each of a sequence and a path of its own; in between some of none."""
    for asked in (*KINDS, None, KINDS[-1], Processors()):
        if asked is None:
            yield None
            continue
        tokens = generator.integers(0, min(vocab, 400), 600).tolist()
        path = tuple(generator.integers(0, min(vocab, 9), generator.integers(0, 6)).tolist())
        temperature = float(generator.choice([0.0, 0.2, 1.0, 4.0], p=[0.1, 0.3, 0.3, 0.3]))
        matcher = None if asked != Processors() else Listed(vocab, [0, vocab - 1])
        yield context_of(asked, tokens, path, vocab=vocab, temperature=temperature, matcher=matcher)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocab", [8, 1000, 49152])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_is_the_same_alone_and_in_any_company(vocab: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    contexts = list(company(vocab, generator))
    logits = torch.from_numpy(generator.normal(0, 3, (len(contexts), vocab))).float()
    if seed == 2:
        logits = logits.bfloat16().float()  # many ties
    alone = logits.clone()
    with threads(1):
        for row, context in enumerate(contexts):
            process(alone[row : row + 1], [context])
    for size in range(1, len(contexts) + 1):
        rows = generator.permutation(len(contexts))[:size].tolist()
        batch = logits[rows]
        with threads(1 + size % 2):
            process(batch, [contexts[row] for row in rows])
        assert torch.equal(batch, alone[rows])


def test_company_moves_no_share_by_one_bit() -> None:
    """Each row's top_p is exactly the share of its best few: a sum that differs decides anew."""
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.normal(0, 3, (16, 49152))).float()
    contexts = []
    for row in logits.numpy():
        weights = np.exp(row.astype(np.float64) - row.max())
        share = np.cumsum(-np.sort(-weights))[generator.integers(5, 200)] / weights.sum()
        contexts.append(context_of(Processors(top_p=float(share)), vocab=49152))
    alone = logits.clone()
    for row in range(16):
        with threads(1 + row % 2):
            process(alone[row : row + 1], [contexts[row]])
    for size in (2, 3, 16):
        for count in (1, 2):
            batch = logits[:size].clone()
            with threads(count):
                process(batch, contexts[:size])
            assert torch.equal(batch, alone[:size])


@pytest.mark.parametrize("vocab", [8, 49152])
def test_a_row_is_the_same_on_a_path_and_after_its_commit(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    logits = torch.from_numpy(generator.normal(0, 3, (1, vocab))).float()
    for asked in KINDS:
        for _ in range(4):
            tokens = generator.integers(0, 8, 20).tolist()
            at = int(generator.integers(0, 21))
            guessed, known = logits.clone(), logits.clone()
            process(guessed, [context_of(asked, tokens[:at], tuple(tokens[at:]), vocab=vocab)])
            grown = context_of(asked, tokens[:at], vocab=vocab)
            for token in tokens[at:]:
                grown.history.commit([token])
            process(known, [grown])
            assert torch.equal(guessed, known)


def test_padded_heads_keep_their_layout() -> None:
    """A row is changed in place where the rows of the head lie further apart than they are long."""
    wide = torch.zeros(3, 12)
    process(wide[:, :8], [context_of(Processors(bias=(Bias(1, 2.0),), top_k=2)), None, None])
    assert wide[0].tolist() == [0.0, 2.0, *[-INF] * 6, *[0.0] * 4]
    assert not wide[1:].any()
