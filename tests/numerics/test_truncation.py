"""What top_k, top_p and min_p leave of a row, by hand and by the definition over whole rows."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from protos.sampling import Processors, Sampling
from target_workers.model.truncation import LEADERS, MORE, is_limited, limits_of, truncate

INF = math.inf


def kept(logits: Sequence[float] | Tensor, asked: Processors, temperature: float = 1.0) -> set[int]:
    row = torch.as_tensor(logits, dtype=torch.float32).clone()[None]
    sampling = Sampling(temperature=temperature, processors=asked)
    if is_limited(sampling):
        truncate(row, limits_of([sampling], row.shape[1]))
    return set((row[0] > -INF).nonzero()[:, 0].tolist())


def test_of_equals_the_lowest_ids_stay() -> None:
    logits = [1.0, 3.0, 2.0, 2.0, 0.0, 2.0, 2.0, 3.0]
    assert kept(logits, Processors(top_k=1)) == {1}
    assert kept(logits, Processors(top_k=4)) == {1, 7, 2, 3}
    assert kept([0.0] * 8, Processors(top_k=3)) == {0, 1, 2}
    assert kept([0.0] * 8, Processors(top_p=0.5)) == {0, 1, 2, 3}
    assert kept([0.0] * 10, Processors(top_p=0.7)) == set(range(7))
    assert kept([0.0] * 8, Processors(min_p=1.0)) == set(range(8))


def test_shares_are_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, Processors(top_p=0.65)) == {0, 1}
    assert kept(logits, Processors(top_p=0.75)) == {0, 1, 2}
    assert kept(logits, Processors(top_k=3, top_p=0.75)) == {0, 1}
    assert kept(logits, Processors(top_k=2, top_p=0.5)) == {0}


def test_filters_go_by_the_temperature_and_by_none_at_zero() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    asked = Processors(top_p=0.45, min_p=0.6)
    assert kept(logits, asked, 1.0) == {0, 1}
    assert kept(logits, asked, 0.5) == {0}
    assert kept(logits, replace(asked, top_p=1.0), 0.3) == {0}
    assert kept(logits, replace(asked, top_p=1.0), 10.0) == {0, 1, 2, 3}
    assert kept(logits, Processors(top_k=1, top_p=0.1, min_p=1.0), 0.0) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 10.0])
@pytest.mark.parametrize(
    "asked",
    [Processors(top_p=1e-9), Processors(top_k=1), Processors(top_p=0.0), Processors(min_p=1.5)],
)
def test_the_best_always_stays(asked: Processors, temperature: float) -> None:
    assert kept([-5.0, 40.0, 39.0, -INF], asked, temperature) == {1}


def test_limits_of_all_tokens_and_more_are_none() -> None:
    logits = [0.0, 1.0, -INF, 3.0]
    for asked in (Processors(top_k=4), Processors(top_k=1 << 70), Processors(min_p=1e-30)):
        assert kept(logits, asked) == {0, 1, 3}


def by_definition(logits: Tensor, asked: Processors, temperature: float) -> set[int]:
    """Which stay, from the whole row in order."""
    order = logits.sort(descending=True, stable=True).indices
    weights = ((logits[order].double() - logits.max()) / temperature).exp()
    few = asked.top_k or len(weights)
    shares = weights.cumsum(0) / weights[:few].sum()
    by_share = int((shares < asked.top_p).sum()) + 1 if asked.top_p < 1 else len(weights)
    return set(order[: min(few, by_share, int((weights >= asked.min_p).sum()))].tolist())


LARGE = (LEADERS - 1, LEADERS, LEADERS + 1, LEADERS + 2, MORE - 1, MORE, MORE + 1, 49151, 49152)
MANY = [
    *(Processors(top_k=count) for count in LARGE),
    *(Processors(top_k=count, top_p=0.9) for count in LARGE),
    *(Processors(top_p=share) for share in (0.1, 0.9, 0.999, 1 - 1e-7)),
    *(Processors(min_p=share) for share in (0.5, 1e-2, 1e-5)),
    Processors(top_k=700, top_p=0.95, min_p=1e-4),
]


@pytest.mark.parametrize("asked", MANY, ids=str)
def test_more_may_stay_than_are_looked_at_first(asked: Processors) -> None:
    logits = torch.randn(49152, generator=torch.Generator().manual_seed(5)) * 3
    for row in (logits, logits.bfloat16().float(), (logits * 0.5).round(), logits * 0):
        for temperature in (0.3, 1.0, 3.0):
            found = kept(row, asked, temperature)
            assert found == by_definition(row, asked, temperature)
