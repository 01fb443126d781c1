"""Every exact rule, through drafter, orchestrator and target: answers are spread as the model says.

The drafter is another model, so that guesses are refused as well as accepted.
"""

import asyncio
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from orchestrator.request import Delta, Finished, Mode, Request
from orchestrator.runtime import Runtime
from protos.sampling import Processors, Sampling
from tests.integration.test_equality import serving
from tests.integration.test_scoring import log_probs
from tests.reference.rules import fit
from tests.tiny import make_tiny_llama

VOCAB, LENGTH, TEMPERATURE = 6, 3, 1.5
PROMPT = (3, 4, 5)
AT_ONCE = 64
EXACT = ("match", "rejection", "sampled")


def expected(model: Path) -> dict[tuple[int, ...], float]:
    """The chance of every answer."""
    chances = {}
    for answer in product(range(VOCAB), repeat=LENGTH):
        rows = log_probs(model, (*PROMPT, *answer))[len(PROMPT) - 1 : -1]
        scaled = (rows / TEMPERATURE).double().log_softmax(-1)
        chances[answer] = float(scaled[range(LENGTH), answer].sum().exp())
    return chances


async def answers(runtime: Runtime, rule: str, count: int) -> tuple[Counter[tuple[int, ...]], int]:
    """How often every answer came, by so many seeds; and how many guesses stood."""
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0

    async def ask(seed: int) -> None:
        nonlocal accepted
        sampling = Sampling(TEMPERATURE, seed, rule, prompt_tokens=len(PROMPT))
        request = Request(f"{seed}", PROMPT, LENGTH, sampling, mode=Mode.SYNC, k=1 + seed % 3)
        tokens: list[int] = []
        async for update in runtime.generate(request):
            if isinstance(update, Delta):
                tokens += update.tokens
            elif isinstance(update, Finished):
                accepted += update.stats.accepted
        found[tuple(tokens)] += 1

    # Wave by wave: while a prompt is due, nobody waits for guesses.
    for first in range(0, count, AT_ONCE):
        await asyncio.gather(*(ask(seed) for seed in range(first, min(first + AT_ONCE, count))))
    return found, accepted


async def spread(folder: Path, rule: str, count: int) -> None:
    model, stranger = (make_tiny_llama(folder / f"{seed}", seed, vocab=VOCAB) for seed in (1, 2))
    limits = {"max_sequences": AT_ONCE, "step_rows": 4 * AT_ONCE, "lookup": False}
    async with serving(model, stranger, "fp32", **limits) as runtime:
        found, accepted = await answers(runtime, rule, count)
    assert sum(found.values()) == count
    assert 0.05 * count < accepted < 1.9 * count, "guesses stand and fall"
    assert fit(found, expected(model)).is_good


@pytest.mark.parametrize("rule", EXACT)
async def test_answers_are_spread_as_the_model_says(tmp_path: Path, rule: str) -> None:
    await spread(tmp_path, rule, 2000)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rule", EXACT)
async def test_many_answers_are_spread_as_the_model_says(tmp_path: Path, rule: str) -> None:
    await spread(tmp_path, rule, 30_000)


@pytest.mark.parametrize("rule", EXACT)
async def test_a_model_that_drafts_for_itself_is_believed(tmp_path: Path, rule: str) -> None:
    """B013: with only one token to choose from, every guess stands."""
    model = make_tiny_llama(tmp_path / "model", 1)
    sampling = Sampling(1.0, 5, rule, Processors(top_k=1), len(PROMPT))
    async with serving(model, model, "fp32", lookup=False) as runtime:
        async for update in runtime.generate(
            Request("own", PROMPT, 100, sampling, mode=Mode.SYNC, k=4)
        ):
            if isinstance(update, Finished):
                assert update.stats.accepted == update.stats.drafted >= 78
