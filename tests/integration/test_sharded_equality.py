"""A target in ranks behind the real orchestrator, in process: many requests, one truth."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
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
from orchestrator.sharded_port import RankPort, ShardedPort
from protos.codec import row_hash
from protos.engine_thread import LinkLimits
from protos.messages import Message, Step, TreeNode
from protos.sampling import Sampling
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from target_workers.model.shard import Shard
from tests.simulation.scene import IdStopper
from tests.tiny import make_tiny_llama

PROMPT = tuple(range(20, 40))
TOKENS = 24
MODES = (Mode.SYNC, Mode.ASYNC)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The target, and two strangers that draft for it."""
    return [make_tiny_llama(tmp_path_factory.mktemp(f"{i}"), i) for i in range(3)]


class Meddler:
    """A rank's port through which, once, a step passes with a block of another length."""

    def __init__(self, port: LocalPort) -> None:
        self.port = port
        self.name, self.host = port.name, port.host
        self.connect, self.receive, self.close = port.connect, port.receive, port.close
        self.has_meddled = False

    def send(self, message: Message) -> None:
        if isinstance(message, Step) and message.extends and not self.has_meddled:
            longer = replace(message.extends[0], nodes=(TreeNode(-1, 3), TreeNode(0, 3)))
            extends = (longer, *message.extends[1:])
            rows = row_hash(message.opens, extends, message.closes)
            message = replace(message, row_hash=rows, extends=extends)
            self.has_meddled = True
        self.port.send(message)


@asynccontextmanager
async def serving(
    folders: list[Path], tp: int, wrap: Callable[[LocalPort], RankPort] = lambda port: port
) -> AsyncIterator[Runtime]:
    """A target in `tp` ranks; it drafts for itself, and so do two strangers.

    `wrap` is what the last rank is reached through.
    """
    whole = TargetConfig(
        str(folders[0]), dtype="bf16", num_pages=256, max_context=256, host="127.0.0.1"
    )
    ranks = [
        LocalPort(
            f"target rank {i}",
            partial(load_target, replace(whole, shard=Shard(i, tp)), vocab_hash="", incarnation=i),
            LinkLimits(),
        )
        for i in range(tp)
    ]
    drafters = [
        LocalPort(
            f"drafter-{i}",
            partial(
                load_drafter,
                DrafterConfig(str(folder), num_slots=4096, max_context=256),
                vocab_hash="",
                incarnation=i,
            ),
            LinkLimits(),
        )
        for i, folder in enumerate(folders)
    ]
    core = Core(CoreConfig(max_context=256, max_queue=512), FixedK(4), IdStopper)
    ports = [*ranks[:-1], wrap(ranks[-1])]
    runtime = Runtime(core, [ShardedPort("target", ports, 7.0)], drafters)
    await runtime.start()
    try:
        await runtime.wait_ready(60)
        yield runtime
    finally:
        await runtime.stop()
        for port in (*ranks, *drafters):
            await port.stop()


async def generate(runtime: Runtime, name: str, seed: int, mode: Mode) -> tuple[list[int], int]:
    """The tokens of a request at temperature 1, and how many guesses were accepted for it."""
    tokens: list[int] = []
    sampling = Sampling(temperature=1.0, seed=seed)
    request = Request(name, PROMPT, TOKENS, sampling, mode=mode, k=4)
    async for update in runtime.generate(request):
        if isinstance(update, Delta):
            tokens.extend(update.tokens)
    assert isinstance(update, Finished), update
    assert update.reason is FinishReason.LENGTH, update
    return tokens, update.stats.accepted


@pytest.mark.parametrize(
    ("tp", "count"),
    [
        (2, 24),
        pytest.param(2, 200, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
        pytest.param(4, 200, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
async def test_ranks_verify_the_same_and_draw_the_same(
    folders: list[Path], tp: int, count: int
) -> None:
    """B094 and B095: three drafters race, every step's rows and answers are the same on all ranks.

    Each request is drafted once and plain once: exact mode gives the same tokens.
    """
    async with serving(folders, tp) as runtime:
        drafted = await asyncio.gather(
            *(generate(runtime, f"drafted {i}", i, MODES[i % 2]) for i in range(count))
        )
        plain = await asyncio.gather(
            *(generate(runtime, f"plain {i}", i, Mode.OFF) for i in range(count))
        )
        (account,) = [a for name, a in (await runtime.audit()).items() if name == "target"]
        lost = runtime.core.counters.targets_lost
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    assert sum(accepted for _, accepted in drafted) > count, "guesses are at stake"
    assert len({tuple(tokens) for tokens, _ in plain}) > count // 2, "choices vary"
    assert account is not None and account.held == ()
    assert lost == 0


async def test_a_rank_that_gets_other_rows_is_found_out_and_the_group_formed_anew(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """B096: no hang, the cause in the log, and the stream ends as it would have."""
    meddlers: list[Meddler] = []

    def wrap(port: LocalPort) -> Meddler:
        meddlers.append(Meddler(port))
        return meddlers[0]

    async with serving(folders, 2, wrap) as runtime:
        spoilt, _ = await generate(runtime, "spoilt", 5, Mode.OFF)
        sound, _ = await generate(runtime, "sound", 5, Mode.OFF)
        assert runtime.core.counters.targets_lost == 1
    assert meddlers[0].has_meddled
    assert spoilt == sound
    assert any(
        "no link to target: target rank" in m and "the group broke: rank" in m
        for m in caplog.messages
    ), caplog.messages
