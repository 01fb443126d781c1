"""What a drafter draws from is exactly what is sent, and nothing else is a distribution."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from target_workers.model.dist import SUPPORT, draw, read, write
from target_workers.model.sampling import choose

INF = math.inf


def random_logits(seed: int, vocab: int) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def packed(ids: list[int], probs: list[float]) -> bytes:
    """The format by its definition."""
    return np.array(ids, "<i4").tobytes() + np.array(probs, "<f4").tobytes()


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 3000])
def test_the_best_tokens_are_sent_with_their_shares(vocab: int) -> None:
    logits = random_logits(vocab, vocab)
    token, dist = draw(logits, 0.7, 3, 11)
    ids, probs = read(dist)
    best = logits.argsort(descending=True)[:SUPPORT].sort().values
    assert torch.equal(ids, best)
    expected = (logits[best].double() / 0.7).softmax(0)
    assert torch.allclose(probs, expected, rtol=1e-6)
    assert token in ids.tolist()


def test_of_equals_the_lowest_ids_are_sent() -> None:
    logits = torch.zeros(500)
    logits[400] = 1.0
    ids, _ = read(draw(logits, 1.0, 0, 0)[1])
    assert ids.tolist() == [*range(SUPPORT - 1), 400]


def test_a_masked_token_is_neither_sent_nor_drawn() -> None:
    logits = torch.full((200,), -INF)
    logits[[7, 9, 150]] = torch.tensor((0.0, 1.0, 2.0))
    for seed in range(50):
        token, dist = draw(logits, 1.0, seed, 5)
        assert read(dist)[0].tolist() == [7, 9, 150]
        assert token in (7, 9, 150)
    logits[[7, 9]] = -INF
    token, dist = draw(logits, 1.0, 0, 5)
    assert (token, dist) == (150, packed([150], [1.0]))


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_every_temperature_gives_a_distribution(temperature: float, scale: float) -> None:
    logits = torch.linspace(-1, 1, 100) * scale
    token, dist = draw(logits, temperature, 1, 2)
    ids, probs = read(dist)
    assert token in ids.tolist() and probs.isfinite().all()
    if scale / temperature >= 1e4:
        assert (token, dist) == (99, packed([99], [1.0]))


def test_tokens_that_tie_share_even_at_the_lowest_temperature() -> None:
    logits = torch.tensor((0.0, 3.0, 1.0, 3.0))
    drawn = {draw(logits, 1e-6, seed, 0) for seed in range(50)}
    both = packed([1, 3], [0.5, 0.5])
    assert drawn == {(1, both), (3, both)}


@pytest.mark.parametrize("bad", [(math.nan, 0.0), (INF, 0.0), (-INF, -INF)])
def test_logits_that_are_not_finite_are_refused(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="position 17"):
        draw(torch.tensor(bad), 1.0, 0, 17)


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) - 1, (1 << 64) - 1])
def test_seed_and_position_decide(seed: int) -> None:
    logits = random_logits(1, 50)
    assert draw(logits, 2.0, seed, 9) == draw(logits.clone(), 2.0, seed, 9)
    assert len({draw(logits, 2.0, seed, position)[0] for position in range(40)}) > 5
    assert len({draw(logits, 2.0, seed ^ change, 9)[0] for change in range(40)}) > 5


def test_ids_that_nobody_knows_change_nothing() -> None:
    logits = random_logits(2, 100)
    wider = torch.cat((logits, torch.full((60,), -INF)))
    for position in range(30):
        assert draw(logits, 1.0, 4, position) == draw(wider, 1.0, 4, position)


def test_tokens_are_drawn_as_often_as_is_sent() -> None:
    logits = torch.tensor((0.0, 1.5, -1.0, 0.7))
    drawn = [draw(logits, 0.8, 6, position) for position in range(2000)]
    assert len({dist for _, dist in drawn}) == 1
    ids, probs = read(drawn[0][1])
    counts = Counter(token for token, _ in drawn)
    for token, prob in zip(ids.tolist(), probs.tolist(), strict=True):
        assert abs(counts[token] / 2000 - prob) < 4 * math.sqrt(prob * (1 - prob) / 2000)


def test_a_draw_tells_nothing_of_the_token_that_match_chooses() -> None:
    flat, same = torch.zeros(10), 0
    for position in range(1000):
        chosen = choose(
            flat[None],
            torch.ones(1, dtype=torch.float64),
            torch.tensor([5]),
            torch.tensor([position]),
        )
        same += draw(flat, 1.0, 5, position)[0] == int(chosen.tokens[0])
    assert 60 < same < 140


def test_float32_shares_are_read_as_what_sums_to_one() -> None:
    ids, probs = read(packed([0, 4, 9], [0.3, 0.3, 0.4]))
    assert ids.tolist() == [0, 4, 9]
    assert abs(float(probs.sum()) - 1) < 1e-15
    assert abs(float(probs[2]) - 0.4) < 1e-7
    assert write(ids, probs) == packed([0, 4, 9], [0.3, 0.3, 0.4])


@pytest.mark.parametrize(
    ("dist", "why"),
    [
        (b"", "0 bytes"),
        (packed([1], [1.0])[:7], "7 bytes"),
        (packed([1], [1.0]) + b"\0", "9 bytes"),
        (packed([*range(65)], [1 / 65] * 65), "520 bytes"),
        (packed([2, 1], [0.5, 0.5]), "do not rise"),
        (packed([2, 2], [0.5, 0.5]), "do not rise"),
        (packed([-1, 2], [0.5, 0.5]), "do not rise"),
        (packed([1, 2], [1.0, 0.0]), "not positive"),
        (packed([1, 2], [1.5, -0.5]), "not positive"),
        (packed([1, 2], [0.5, math.nan]), "not positive"),
        (packed([1, 2], [0.5, INF]), "sum to 1"),
        (packed([1, 2], [0.5, 0.4]), "sum to 1"),
        (packed([1, 2], [0.9, 0.9]), "sum to 1"),
    ],
)
def test_what_is_no_distribution_is_refused(dist: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(dist)
