"""Speculation is invisible in the output: real engines, in process, whatever K, mode and batch."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from drafter_workers.config import DrafterConfig
from drafter_workers.loading import load_drafter
from orchestrator.config import CoreConfig
from orchestrator.core import Core
from orchestrator.k_policy import FixedK
from orchestrator.local_port import LocalPort
from orchestrator.request import Delta, Finished, FinishReason, Mode, Request
from orchestrator.runtime import Runtime
from protos.engine_thread import LinkLimits
from protos.sampling import GREEDY, Sampling
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from tests.simulation.scene import IdStopper
from tests.tiny import make_tiny_llama

KS = (1, 2, 4, 8)
SEEDED = Sampling(temperature=0.8, seed=2**62 + 5)
VARIANTS = [(Mode.OFF, None), *product((Mode.SYNC, Mode.ASYNC), KS)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@asynccontextmanager
async def serving(
    target: Path, drafter: Path, dtype: str, num_pages: int = 512, **core
) -> AsyncIterator[Runtime]:
    """A runtime over both engines in process."""
    slots = 8192
    target_config = TargetConfig(str(target), dtype=dtype, num_pages=num_pages, max_context=1024)
    drafter_config = DrafterConfig(str(drafter), dtype=dtype, num_slots=slots, max_context=1024)
    limits = LinkLimits()
    ports = [
        LocalPort(
            "target", lambda: load_target(target_config, vocab_hash="", incarnation=1), limits
        ),
        LocalPort(
            "drafter", lambda: load_drafter(drafter_config, vocab_hash="", incarnation=1), limits
        ),
    ]
    config = CoreConfig(max_context=1024, **core)
    runtime = Runtime(Core(config, FixedK(4), IdStopper), ports[:1], ports[1:])
    await runtime.start()
    try:
        await runtime.wait_ready(60)
        yield runtime
    finally:
        await runtime.stop()
        for port in ports:
            await port.stop()


async def generate(runtime: Runtime, request: Request) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async for update in runtime.generate(request):
        if isinstance(update, Delta):
            tokens.extend(update.tokens)
    assert isinstance(update, Finished)
    assert update.reason is FinishReason.LENGTH
    return tokens, update


async def check_all_variants(runtime: Runtime, prompt: tuple[int, ...], max_tokens: int) -> int:
    """Every mode and K at once, in one shifting batch; the number of guesses accepted."""
    accepted = 0
    for sampling in (GREEDY, SEEDED):
        asked = [
            Request(f"{mode.value} {k} {sampling}", prompt, max_tokens, sampling, mode=mode, k=k)
            for mode, k in VARIANTS
        ]
        answers = await asyncio.gather(*(generate(runtime, each) for each in asked))
        alone, _ = await generate(
            runtime, Request("alone", prompt, max_tokens, sampling, mode=Mode.OFF)
        )
        for request, (tokens, finished) in zip(asked, answers, strict=True):
            assert tokens == alone, request.request_id
            accepted += finished.stats.accepted
    return accepted


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("drafter_seed", [1, 2], ids=["itself", "a stranger"])
async def test_every_mode_and_k_gives_the_same_tokens(tmp_path, dtype, drafter_seed) -> None:
    target = make_tiny_llama(tmp_path / "target", 1)
    drafter = make_tiny_llama(tmp_path / "drafter", drafter_seed)
    async with serving(target, drafter, dtype) as runtime:
        accepted = await check_all_variants(runtime, tuple(range(20, 60)), 40)
        for account in (await runtime.audit()).values():
            assert account.held == ()
            assert account.free_pages + account.cached_pages == account.total_pages
    assert accepted > 20 or drafter_seed != 1, "guesses must be at stake"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_no_guess_of_the_target_itself_is_rejected(tmp_path, dtype, sampling) -> None:
    """Each K alone, so that every block is waited for and verified whole."""
    model = make_tiny_llama(tmp_path / "target", 1)
    async with serving(model, model, dtype, lookup=False) as runtime:
        for k in KS:
            asked = Request(f"{k}", tuple(range(20, 60)), 40, sampling, mode=Mode.SYNC, k=k)
            _, finished = await generate(runtime, asked)
            assert finished.stats.accepted == finished.stats.drafted >= 15, k


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_a_repeated_word_is_continued_alike_with_and_without_lookup(tmp_path, dtype) -> None:
    """B001: greedy text does not change when lookup is switched on, whatever K, at any time."""
    model = make_tiny_llama(tmp_path / "target", 1)
    stranger = make_tiny_llama(tmp_path / "drafter", 2)
    async with serving(model, stranger, dtype) as runtime:
        prompt = (77,) * 60
        plain, _ = await generate(runtime, Request("plain", prompt, 64, mode=Mode.OFF))
        for k in KS:
            repeats = [Request(f"{k} {i}", prompt, 64, mode=Mode.ASYNC, k=k) for i in range(20)]
            answers = await asyncio.gather(*(generate(runtime, each) for each in repeats))
            assert all(tokens == plain for tokens, _ in answers)
            assert sum(finished.stats.drafted for _, finished in answers) > 0
        assert runtime.core.counters.looked_up > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_shared_pages_and_pauses_change_no_token(tmp_path, dtype) -> None:
    target = make_tiny_llama(tmp_path / "target", 1)
    drafter = make_tiny_llama(tmp_path / "drafter", 2)
    head = tuple(range(20, 60))
    asked = [
        Request(f"{i}", (*head, i, i), 40, sampling, prefix_cache=False, mode=Mode.OFF)
        for i, sampling in enumerate((GREEDY, SEEDED, GREEDY, SEEDED))
    ]
    async with serving(target, drafter, dtype) as runtime:
        alone = [await generate(runtime, each) for each in asked]
    async with serving(target, drafter, dtype, num_pages=12) as runtime:
        await generate(runtime, Request("first", head, 1))
        shared = [replace(each, prefix_cache=True, mode=None) for each in asked]
        answers = await asyncio.gather(*(generate(runtime, each) for each in shared))
        assert runtime.core.counters.preemptions > 0
        for account in (await runtime.audit()).values():
            assert account.free_pages + account.cached_pages == account.total_pages
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in alone]
    assert [finished.stats.cached for _, finished in answers] == [32] * 4
    assert [finished.stats.cached for _, finished in alone] == [0] * 4


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_the_small_model_gives_the_same_tokens_in_every_mode_and_k(
    small_model_folder: Path, dtype: str
) -> None:
    async with serving(small_model_folder, small_model_folder, dtype) as runtime:
        prompt = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)
        accepted = await check_all_variants(runtime, prompt, 24)
    assert accepted > 50
