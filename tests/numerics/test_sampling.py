"""`choose` draws exact samples of the softmax, and the drafters' rankings agree with it."""

import pytest
import torch
from torch import Tensor

from target_workers.model.noise import gumbel
from target_workers.model.sampling import choose, top_perturbed, top_tokens

TEMPERATURES = torch.tensor([0.0, 1e-3, 0.3, 0.8, 1.0, 2.0, 10.0], dtype=torch.float64)


def perturbed_rows(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """The rule by its definition, over whole rows."""
    noise = gumbel(seeds[:, None], positions[:, None], torch.arange(logits.shape[1]))
    scale = torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    return logits.double() / scale + torch.where(temperatures[:, None] == 0, 0.0, noise)


def by_definition(scores: Tensor, count: int) -> Tensor:
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[:, :count]


def random_case(seed: int, vocab: int, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = max(3, 60000 // vocab)
    logits = torch.randn(rows, vocab, generator=generator) * scale
    if seed % 2:
        logits = logits.bfloat16().float()  # many ties
    picked = torch.randint(0, len(TEMPERATURES), (rows,), generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return logits, TEMPERATURES[picked], seeds, torch.arange(rows)


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 1000, 49152])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0])
def test_choices_and_rankings_are_those_of_the_full_computation(vocab: int, scale: float) -> None:
    for seed in range(4):
        logits, temperatures, seeds, positions = random_case(seed, vocab, scale)
        scores = perturbed_rows(logits, temperatures, seeds, positions)
        count = min(8, vocab)
        choice = choose(logits, temperatures, seeds, positions)
        assert choice.finite.all()
        assert torch.equal(choice.tokens, by_definition(scores, 1)[:, 0])
        perturbed = top_perturbed(logits, temperatures, seeds, positions, count)
        assert torch.equal(perturbed.tokens, by_definition(scores, count))
        plain = top_tokens(logits, temperatures, count)
        assert torch.equal(plain.tokens, by_definition(logits, count))


def test_more_tokens_than_leaders_can_be_ranked() -> None:
    logits, temperatures, seeds, positions = random_case(0, 1000, 2.0)
    scores = perturbed_rows(logits, temperatures, seeds, positions)
    ranked = top_perturbed(logits, temperatures, seeds, positions, 100)
    assert torch.equal(ranked.tokens, by_definition(scores, 100))


def test_a_choice_does_not_depend_on_the_other_rows() -> None:
    logits, temperatures, seeds, positions = random_case(3, 5000, 3.0)
    together = choose(logits, temperatures, seeds, positions).tokens
    for row in range(len(logits)):
        here = slice(row, row + 1)
        alone = choose(logits[here], temperatures[here], seeds[here], positions[here]).tokens
        assert alone[0] == together[row]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_frequencies_pass_a_chi_square_test_against_softmax(temperature: float) -> None:
    draws, vocab = 20000, 40
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    tokens = choose(
        logits.expand(draws, -1).contiguous(),
        torch.full((draws,), temperature, dtype=torch.float64),
        torch.full((draws,), 99),
        torch.arange(draws),
    ).tokens
    expected = (logits.double() / temperature).softmax(0) * draws
    counts = torch.bincount(tokens, minlength=vocab).double()
    common = expected >= 5
    pooled = torch.stack((counts[~common].sum(), expected[~common].sum()))
    chi_square = ((counts - expected) ** 2 / expected)[common].sum()
    if pooled[1] > 0:
        chi_square += (pooled[0] - pooled[1]) ** 2 / pooled[1]
    assert chi_square < 80, "the 0.9999 quantile for 39 degrees of freedom is 83"


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [700, 31, 900]] = 5.0
    logits[1, 999] = 5.0
    zeros = torch.zeros(2, dtype=torch.int64)
    choice = choose(logits, torch.zeros(2), zeros, zeros)
    assert choice.tokens.tolist() == [31, 999]
    assert top_tokens(logits, torch.zeros(2), 4).tokens.tolist() == [
        [31, 700, 900, 0],
        [999, 0, 1, 2],
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_are_not_finite_get_no_token(temperature: float) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    logits[1, 17] = float("nan")
    logits[2, 17] = float("inf")
    logits[3] = float("-inf")
    rows = torch.arange(5)
    choice = choose(logits, torch.full((5,), temperature), rows, rows)
    assert choice.finite.tolist() == [True, False, False, False, True]
    assert (choice.tokens >= 0).tolist() == choice.finite.tolist()


def test_a_masked_token_is_never_chosen() -> None:
    logits = torch.full((200, 100), float("-inf"))
    logits[:, 40:43] = 0.0
    rows = torch.arange(200)
    choice = choose(logits, torch.full((200,), 5.0), rows, rows)
    assert set(choice.tokens.tolist()) == {40, 41, 42}
    ranked = top_perturbed(logits, torch.full((200,), 5.0), rows, rows, 8).tokens
    assert torch.equal(ranked[:, 0], choice.tokens)
    assert torch.equal(ranked[:, :3].sort().values, torch.tensor([40, 41, 42]).expand(200, -1))
    assert torch.equal(ranked[:, 3:], torch.arange(5).expand(200, -1))


def test_log_probabilities_are_of_the_softmax_at_the_temperature() -> None:
    logits, temperatures, seeds, positions = random_case(2, 1000, 2.0)
    scale = torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    expected = (logits.double() / scale).log_softmax(-1)
    for ranked in (
        top_tokens(logits, temperatures, 6),
        top_perturbed(logits, temperatures, seeds, positions, 6),
    ):
        difference = ranked.log_probs.double() - expected.gather(1, ranked.tokens)
        assert (difference.abs() <= 1e-5 * (1 + expected.abs().amax(1, keepdim=True))).all()
