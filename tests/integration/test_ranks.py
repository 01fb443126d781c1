"""A target in several processes: a rank that dies or hangs is named, and everything goes on."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from protos.paceline.v1 import generation_pb2 as pb
from services.client import Client, Options
from services.config import (
    ClusterConfig,
    Config,
    LimitsConfig,
    ModelConfig,
    TargetConfig,
)
from services.launch import Service, launched
from services.preflight import LaunchError
from tests.integration.test_launch import (
    SERVER,
    children,
    is_not_serving,
    is_serving,
    until,
)
from tests.tiny import make_tiny_llama
from tests.unit.services.tiny_folder import VOCAB_SIZE, byte_level_folder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

TIMEOUT_S = 2.0
SLACK_S = 1.5
STREAMS = 4
TOKENS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_llama(byte_level_folder(folder), seed=1, vocab=VOCAB_SIZE)


def config(model: Path, tp: int = 2) -> Config:
    return Config(
        model=ModelConfig(path=str(model)),
        target=TargetConfig(tp=tp),
        limits=LimitsConfig(max_context=512),
        cluster=ClusterConfig(rank_timeout_s=TIMEOUT_S),
        server=SERVER,
    )


async def stream(service: Service, index: int, begun: asyncio.Event | None = None) -> list[int]:
    """The tokens of one long seeded answer."""
    tokens: list[int] = []
    options = Options(max_tokens=TOKENS, temperature=1.0, seed=index)
    async with (
        Client(service.address) as client,
        aclosing(client.generate_stream("the cat sat", options, timeout_s=60)) as events,
    ):
        async for event in events:
            if isinstance(event, pb.Delta):
                tokens.extend(event.token_ids)
                if begun is not None:
                    begun.set()
    return tokens


async def streams(service: Service) -> list[list[int]]:
    return await asyncio.gather(*(stream(service, i) for i in range(STREAMS)))


@asynccontextmanager
async def load(service: Service, expected: list[list[int]]) -> AsyncIterator[None]:
    """Streams that have all begun; after the body they end with the tokens they always had."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    running = [asyncio.create_task(stream(service, i, begun[i])) for i in range(STREAMS)]
    await asyncio.gather(*(each.wait() for each in begun))
    assert not any(task.done() for task in running)
    yield
    assert await asyncio.gather(*running) == expected


async def rank_process(service: Service, rank: int) -> int:
    """The process that listens where a rank was found."""
    (link,) = service.runtime._roster.targets
    health = await link.port._ranks[rank]._locate.__self__._actor.describe.remote()
    return health.pid


def causes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why the target was lost, each time."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("no link to target: ")
    ]


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS = [
    pytest.param(2, [(0, KILL), (1, KILL), (1, STOP)], id="two ranks"),
    pytest.param(2, [(0, STOP)], id="the first one hangs", marks=pytest.mark.long),
    pytest.param(3, [(2, KILL), (0, KILL), (1, STOP)], id="three", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("tp", "faults"), FAULTS)
async def test_each_rank_may_die_or_hang_under_load(
    model: Path,
    caplog: pytest.LogCaptureFixture,
    tp: int,
    faults: list[tuple[int, signal.Signals]],
) -> None:
    """B097."""
    caplog.set_level(logging.WARNING)
    async with launched(config(model, tp), lambda _line: None) as service:
        expected = await streams(service)
        for rank, number in faults:
            caplog.clear()
            pid = await rank_process(service, rank)
            async with load(service, expected):
                os.kill(pid, number)
                await until(lambda: not service.runtime.has_target, TIMEOUT_S + SLACK_S)
                await until(lambda: is_not_serving(service), within_s=2)
                assert f"rank {rank}" in causes(caplog)[0], causes(caplog)
            await until(lambda: is_serving(service), within_s=60)
            assert pid not in children("ray::")
            assert await streams(service) == expected
            assert any(f"the process of target rank {rank}" in m for m in caplog.messages)
        for account in (await service.runtime.audit()).values():
            assert account is not None and account.held == ()
    assert not children("ray::")


@pytest.mark.long
@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "hung"])
async def test_a_rank_may_die_or_hang_before_the_first_step(
    model: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    caplog.set_level(logging.WARNING)
    async with launched(config(model), lambda _line: None) as service:
        os.kill(await rank_process(service, 1), number)
        first = await stream(service, 0)
        assert "rank 1" in causes(caplog)[0], causes(caplog)
        assert await stream(service, 0) == first
    assert not children("ray::")


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (KILL, r"target rank \d (died while it|could not be) started"),
        (STOP, "not loaded after 15 s"),
    ],
    ids=["killed", "hung"],
)
async def test_a_rank_may_die_or_hang_while_it_starts(
    model: Path, number: signal.Signals, says: str
) -> None:
    cluster = ClusterConfig(rank_timeout_s=TIMEOUT_S, start_timeout_s=15)
    started = asyncio.Event()

    def heard(line: str) -> None:
        if "rank 1: loading" in line:
            started.set()

    async def start() -> None:
        async with launched(replace(config(model), cluster=cluster), heard):
            pass

    starting = asyncio.create_task(start())
    await started.wait()
    await until(lambda: children("ray::TargetActor.start"), within_s=30)
    os.kill(children("ray::TargetActor.start")[-1], number)
    with pytest.raises(LaunchError, match=says):
        await starting
    await until(lambda: not children("ray"), within_s=20)  # those that Ray was starting, too
