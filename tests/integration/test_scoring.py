"""Log-probabilities of prompts and answers, as a client gets them, beside a plain computation."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafter_workers.training.teachers import run_rows
from orchestrator.request import Delta, Finished, FinishReason, Mode, PromptScored, Request, Update
from orchestrator.runtime import Runtime
from protos.sampling import Bias, Processors, Sampling, Score, Scoring
from target_workers.model.loading import load_reference
from tests.integration.test_equality import serving
from tests.tiny import make_tiny_llama

PROMPT = tuple(range(20, 60))


async def updates(runtime: Runtime, request: Request) -> list[Update]:
    return [update async for update in runtime.generate(request)]


def log_probs(model: Path, tokens: Sequence[int]) -> Tensor:
    """After every token: [tokens, vocab]."""
    decoder = load_reference(model, dtype=torch.float32)
    with torch.no_grad():
        return decoder.logits(run_rows(decoder, torch.tensor([tokens]))).log_softmax(-1)


def check(score: Score, expected: Tensor, token: int, best: int) -> None:
    """A score beside the log-probabilities [vocab] at its place."""
    assert score.logprob == pytest.approx(float(expected[token]), abs=1e-4)
    assert score.logprob < 0
    values, ids = expected.topk(best)
    assert score.best == tuple(ids.tolist())
    assert score.best_logprobs == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("rows", [8, 256])
async def test_a_prompt_is_scored_in_order_whatever_its_chunks(tmp_path: Path, rows: int) -> None:
    model = make_tiny_llama(tmp_path / "model", 1)
    request = Request(
        "scored",
        PROMPT,
        0,
        Sampling(prompt_tokens=len(PROMPT)),
        prefix_cache=False,
        scoring=Scoring(prompt=2),
    )
    async with serving(model, model, "fp32", step_rows=rows) as runtime:
        *scored, finished = await updates(runtime, request)
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.LENGTH
    assert finished.stats.accepted + finished.stats.rounds - finished.stats.cut == 0
    expected = log_probs(model, PROMPT)
    position = 1
    for told in scored:
        assert isinstance(told, PromptScored)
        assert told.start == position
        for score in told.scores:
            check(score, expected[position - 1], PROMPT[position], 2)
            position += 1
    assert position == len(PROMPT)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_processed", [False, True])
async def test_every_token_of_an_answer_has_its_score(
    tmp_path: Path, temperature: float, *, is_processed: bool
) -> None:
    """B033, B034: accepted, corrected and last tokens alike, whatever stood of a block."""
    model, stranger = (make_tiny_llama(tmp_path / f"{seed}", seed) for seed in (1, 2))
    bias = Bias(100, 3.0)
    sampling = Sampling(
        temperature, 7, processors=Processors(bias=(bias,)), prompt_tokens=len(PROMPT)
    )
    request = Request(
        "told",
        PROMPT,
        30,
        sampling,
        mode=Mode.SYNC,
        k=4,
        scoring=Scoring(3, processed=is_processed),
    )
    for drafter in (model, stranger):
        async with serving(model, drafter, "fp32") as runtime:
            found = await updates(runtime, replace(request, request_id=drafter.name))
        deltas = [update for update in found if isinstance(update, Delta)]
        tokens = [token for delta in deltas for token in delta.tokens]
        scores = [score for delta in deltas for score in delta.scores]
        assert len(scores) == len(tokens) == 30
        rows = log_probs(model, (*PROMPT, *tokens))[len(PROMPT) - 1 :]
        if is_processed:
            rows[:, bias.token] += bias.value
            rows = (rows / (temperature or 1.0)).log_softmax(-1)
        for score, row, token in zip(scores, rows, tokens, strict=False):
            check(score, row, token, 3)
