"""What goes wrong elsewhere where sampling meets drafts, or the sampling of other requests."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from orchestrator.request import Delta, FinishReason, Mode, Request
from orchestrator.runtime import Runtime
from protos.messages import Extend, StepOpen, TreeNode
from protos.sampling import PLAIN, Bias, Processors, Sampling, Score, Scoring
from target_workers.model.decoder import TorchDecoder
from target_workers.model.loading import load_reference
from tests.driver import Driver
from tests.integration.test_equality import serving
from tests.integration.test_invisible import Answer, answer
from tests.tiny import make_tiny_llama
from tests.tiny_engines import make_target

PROMPT = tuple(range(20, 40))
END = 7
KS = (0, 1, 4, 8)


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A model that drafts for itself."""
    model = make_tiny_llama(tmp_path / "model", 1)
    async with serving(model, model, "fp32") as started:
        yield started


def request(name: str, sampling: Sampling, max_tokens: int = 40, **fields) -> Request:
    placed = replace(sampling, prompt_tokens=len(PROMPT))
    return Request(name, PROMPT, max_tokens, placed, **fields)


async def by_k(runtime: Runtime, asked: Request) -> dict[int, Answer]:
    """The answers with so many guesses a round."""
    return {
        k: await answer(runtime, replace(asked, request_id=f"{k}", mode=Mode.SYNC, k=k)) for k in KS
    }


async def test_penalties_count_every_token_of_a_block(runtime: Runtime) -> None:
    """B015."""
    for processors in (
        Processors(frequency_penalty=0.8),
        Processors(presence_penalty=1.5),
        Processors(repetition_penalty=1.5, frequency_penalty=-0.5),
    ):
        found = await by_k(runtime, request("", Sampling(processors=processors), 60))
        assert {found[k].tokens for k in KS} == {found[0].tokens}
        assert found[8].finished.stats.accepted > 20


async def test_an_end_comes_right_after_the_least_number_of_tokens(runtime: Runtime) -> None:
    """B015: the end is wanted from the first token on, and withheld for seven."""
    eager = Processors(bias=(Bias(END, 60.0),), withheld=(END,), min_tokens=7)
    asked = request("", Sampling(0.8, 3, processors=eager), stop_token_ids=(END,))
    for k, found in (await by_k(runtime, asked)).items():
        assert found.finished.reason is FinishReason.STOP, k
        assert len(found.tokens) == 8, k
        assert found.tokens.index(END) == 7, k


async def test_unlikely_tokens_are_left_out_inside_blocks_too(runtime: Runtime) -> None:
    """B018: min_p holds at every token, accepted or not."""
    asked = request("", Sampling(1.0, 9, processors=Processors(min_p=0.3)), 200, scoring=Scoring(1))
    for found in (await by_k(runtime, asked)).values():
        assert all(is_likely(score, 0.3) for score in found.scores)
    assert found.finished.stats.accepted > 50


def is_likely(score: Score, share: float) -> bool:
    return math.exp(score.logprob - score.best_logprobs[0]) >= share - 1e-4


def test_a_banned_token_is_refused_wherever_it_is_guessed(tmp_path: Path) -> None:
    """B018: a drafter that knows nothing of the ban guesses it again and again."""
    decoder = tiny(tmp_path)
    driver = Driver(make_target(decoder).engine)
    free = driver_tokens(driver, 1, Sampling())
    banned = Sampling(processors=Processors(bias=tuple(Bias(t, -100.0) for t in set(free))))
    driver.open(2, PROMPT, banned)
    nodes = tuple(TreeNode(i - 1, token) for i, token in enumerate(free))
    verdict = driver.extend(2, 0, PROMPT, nodes)
    assert verdict.walk == ()
    assert verdict.next_token not in free


def tiny(folder: Path) -> TorchDecoder:
    return load_reference(make_tiny_llama(folder / "model", 1), dtype=torch.float32)


def driver_tokens(driver: Driver, seq: int, sampling: Sampling) -> list[int]:
    driver.open(seq, PROMPT, sampling)
    return driver.decode(seq, list(PROMPT), 0, 6)


async def test_each_request_is_verified_by_its_own_settings(runtime: Runtime) -> None:
    """B011, B012: in every order, with as many guesses as each wants."""
    greedy = await answer(runtime, request("greedy", Sampling(), mode=Mode.OFF))
    mixed = [
        request("first", Sampling(1.5, 4, processors=Processors(top_k=1)), mode=Mode.SYNC, k=3),
        request("wide", Sampling(1.5, 5), mode=Mode.SYNC, k=1),
        request("narrow", Sampling(0.7, 6, processors=Processors(top_p=0.8)), mode=Mode.OFF),
        request("cold", Sampling(0.1, 7), mode=Mode.ASYNC, k=4),
    ]
    alone = [await answer(runtime, each) for each in mixed]
    assert alone[0].tokens == greedy.tokens
    for order in permutations(range(len(mixed))):
        found = await asyncio.gather(*(answer(runtime, mixed[i]) for i in order))
        assert [each.tokens for each in found] == [alone[i].tokens for i in order]


async def test_a_seed_gives_its_tokens_in_any_company(runtime: Runtime) -> None:
    """B035, B036, B038: alone, beside seeded ones, beside greedy ones, joined half-way."""
    asked = request("seeded", Sampling(2.0, 42), mode=Mode.SYNC, k=4)
    alone = [await answer(runtime, asked) for _ in range(5)]
    company = [
        request("other", Sampling(2.0, 43)),
        request("greedy", Sampling()),
        request("cold", Sampling(0.1, 1)),
        request("warm", Sampling(1.0, 2)),
    ]
    for count in range(1, len(company) + 1):
        found, *others = await asyncio.gather(
            answer(runtime, asked), *(answer(runtime, each) for each in company[:count])
        )
        alone.append(found)
        assert others[0].tokens != found.tokens
    late = asyncio.create_task(answer(runtime, asked))
    early = await first_tokens(runtime, company[0])
    alone.append(await late)
    assert early
    assert len({each.tokens for each in alone}) == 1


async def first_tokens(runtime: Runtime, asked: Request) -> Sequence[int]:
    async for update in runtime.generate(asked):
        if isinstance(update, Delta):
            return update.tokens
    return ()


async def test_seeds_matter_where_there_is_a_choice(runtime: Runtime) -> None:
    """B037."""
    flat = Processors(allowed=tuple(range(8)), bias=tuple(Bias(t, 0.0) for t in range(8)))
    warm = [request(f"{s}", Sampling(10.0, s, processors=flat), 6) for s in range(50)]
    found = await asyncio.gather(*(answer(runtime, each) for each in warm))
    assert len({each.tokens for each in found}) >= 45
    cold = [request(f"{s}", Sampling(0.0, s), 6) for s in range(5)]
    found = await asyncio.gather(*(answer(runtime, each) for each in cold))
    assert len({each.tokens for each in found}) == 1


@pytest.mark.parametrize("max_tokens", [0, *range(1, 12)])
async def test_exactly_so_many_tokens_come(runtime: Runtime, max_tokens: int) -> None:
    """B026, B027, B028: also where a block reaches beyond them."""
    asked = request("", Sampling(processors=PLAIN), max_tokens)
    for found in (await by_k(runtime, asked)).values():
        stats = found.finished.stats
        assert found.finished.reason is FinishReason.LENGTH
        assert len(found.tokens) == max_tokens == stats.accepted + stats.rounds - stats.cut
        assert stats.accepted <= max_tokens
        assert stats.drafted <= max(0, max_tokens - 1) * stats.rounds


def test_a_block_with_an_impossible_guess_ends_with_the_residual(tmp_path: Path) -> None:
    """B010: what follows a refused guess never appears, with or without a cached prefix."""
    decoder = tiny(tmp_path)
    driver = Driver(make_target(decoder).engine)
    own = driver_tokens(driver, 1, Sampling())
    for seq, prefix_cache in ((2, True), (3, False)):
        refused = Processors(bias=(Bias(own[0], 80.0), Bias(own[1], -100.0)))
        sampling = Sampling(1.0, 5, "rejection", refused)
        start = driver.open(seq, PROMPT, sampling, prefix_cache=prefix_cache)
        nodes = tuple(TreeNode(i - 1, token) for i, token in enumerate(own[:4]))
        verdict = driver.extend(seq, start, PROMPT[start:], nodes)
        assert verdict.walk == (0,)
        assert verdict.next_token != own[1]
        again = driver.extend(seq, len(PROMPT) + 1, (verdict.next_token,), keep=(0,))
        assert again.error == ""


def test_nothing_of_a_step_is_changed_by_deciding_it(tmp_path: Path) -> None:
    """B008: the same step twice gives the same, row by row."""
    decoder = tiny(tmp_path)
    nodes = (TreeNode(-1, 5), TreeNode(0, 6), TreeNode(-1, 9))
    found = []
    for _ in range(2):
        driver = Driver(make_target(decoder).engine)
        opens = [
            StepOpen(seq, PROMPT, Sampling(1.0, seq, rule))
            for seq, rule in enumerate(("match", "rejection", "typical", "rejection"), start=1)
        ]
        stepped = driver.send(opens, [Extend(each.seq, 0, PROMPT, nodes) for each in opens])
        found.append(stepped.verdicts)
    assert found[0] == found[1]
