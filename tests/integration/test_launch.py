"""The whole service over tiny real models: it answers, outlives its workers, and leaves nothing."""

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2
from safetensors.torch import load_file, save_file

from drafter_workers.methods import METHODS
from drafter_workers.planting import plant
from drafter_workers.student import Borrowed
from protos.paceline.v1 import generation_pb2 as pb
from services import launch
from services.client import Client, ModeName, Options
from services.config import Config, DrafterConfig, LimitsConfig, ModelConfig, ServerConfig
from services.errors import Unavailable
from services.launch import Service, launched
from services.preflight import LaunchError
from target_workers.model.files import ends_hash
from tests.tiny import make_tiny_llama
from tests.unit.services.tiny_folder import VOCAB_SIZE, byte_level_folder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

SERVER = ServerConfig(grpc="127.0.0.1:0", health="127.0.0.1:0", http="", metrics="", drain_s=2.0)
CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_llama(byte_level_folder(folder), seed=1, vocab=VOCAB_SIZE)


@pytest.fixture
def config(model: Path) -> Config:
    return Config(
        model=ModelConfig(path=str(model)),
        drafter=(DrafterConfig(path=str(model)),),
        limits=LimitsConfig(max_context=512),
        server=SERVER,
    )


async def answer(service: Service, mode: ModeName) -> tuple[list[int], pb.SpeculationStats]:
    """The tokens of one greedy answer, and what speculation did for it."""
    tokens: list[int] = []
    spent = pb.SpeculationStats()
    options = Options(max_tokens=24, temperature=0.0, mode=mode)
    async with (
        Client(service.address) as client,
        aclosing(client.generate_stream("the cat sat", options, timeout_s=30)) as events,
    ):
        async for event in events:
            if isinstance(event, pb.Delta):
                tokens.extend(event.token_ids)
            elif isinstance(event, pb.Finished):
                spent = event.speculation
    return tokens, spent


async def is_serving(service: Service) -> bool:
    async with grpc.aio.insecure_channel(service.health_address) as channel:
        check: grpc.aio.UnaryUnaryMultiCallable[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ] = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        reply = await check(health_pb2.HealthCheckRequest(service=""))
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def is_not_serving(service: Service) -> bool:
    return not await is_serving(service)


def children(name: str) -> list[int]:
    """The processes of this machine whose title contains `name` and that this process started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            state, parent = _stat(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name in title and state != "Z" and _descends(parent):
            found.append(int(folder.name))
    return found


def _descends(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _stat(pid)[1]
    return False


def _stat(pid: int) -> tuple[str, int]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[1])


async def until(holds: Callable[[], object], within_s: float) -> None:
    """Until a condition of the system outside holds. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while True:
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.02)


async def test_it_answers_outlives_its_workers_and_leaves_nothing(config: Config) -> None:
    said: list[str] = []
    async with launched(config, said.append) as service:
        plain, _ = await answer(service, "off")
        sync, spent = await answer(service, "sync")
        assert sync == plain
        assert spent.num_accepted_draft_tokens > 0, "the model drafts perfectly for itself"
        assert (await answer(service, "async"))[0] == plain
        assert await is_serving(service)

        (drafter,) = children("ray::DrafterActor")
        os.kill(drafter, signal.SIGKILL)
        assert (await answer(service, "async"))[0] == plain
        await until(lambda: service.runtime.has_drafter, within_s=30)

        (target,) = children("ray::TargetActor")
        os.kill(target, signal.SIGKILL)
        await until(lambda: not service.runtime.has_target, within_s=2)
        await until(lambda: is_not_serving(service), within_s=2)
        await until(lambda: is_serving(service), within_s=30)
        assert (await answer(service, "off"))[0] == plain

        audit = await service.runtime.audit()
        assert all(reply.held == () for reply in audit.values())
        own = os.sched_getaffinity(0)
    assert sorted(own) == CORES
    assert sorted(os.sched_getaffinity(0)) == CORES
    assert [line for line in said if line.startswith("serving")]
    assert not children("ray::")
    assert not children("raylet")
    with pytest.raises(Unavailable):
        await answer(service, "off")


async def test_on_one_core_a_student_drafts_in_this_process(
    config: Config, model: Path, tmp_path: Path
) -> None:
    """A student of all layers that knows half of the tokens; it borrows the rest of its target."""
    half = tuple(range(0, VOCAB_SIZE, 2))
    plant(model, tmp_path, (0, 1), Borrowed(ends_hash(model), half))
    config = replace(config, drafter=(DrafterConfig(path=str(tmp_path)),))
    said: list[str] = []
    os.sched_setaffinity(0, {CORES[0]})
    try:
        async with launched(config, said.append) as service:
            plain, _ = await answer(service, "off")
            drafted, spent = await answer(service, "sync")
            assert drafted == plain
            assert spent.num_accepted_draft_tokens > 0
            assert not children("ray::DrafterActor")
    finally:
        os.sched_setaffinity(0, CORES)
    assert "one core for target and drafter: the drafter shares this process" in said


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    """The model with one tensor that it has no place for."""
    folder = Path(shutil.copytree(model, tmp_path / "broken"))
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | {"stranger": torch.zeros(4)}, weights, {"format": "pt"})
    return folder


async def test_a_worker_that_cannot_load_is_named_and_nothing_is_left(
    config: Config, broken: Path
) -> None:
    bad = Config(model=ModelConfig(path=str(broken)), limits=config.limits, server=SERVER)
    with pytest.raises(LaunchError, match=r"target could not be started: .*stranger"):
        async with launched(bad, lambda _line: None):
            pass
    assert not children("ray")


def test_the_known_methods_are_those_that_exist() -> None:
    assert set(launch.METHODS) == set(METHODS)


@pytest.mark.parametrize("moment", ["starting Ray", "target: loading", "serving"])
async def test_a_signal_at_any_moment_ends_every_process(model: Path, moment: str) -> None:
    script = "from services.cli import main; main()"
    overrides = [
        f"model.path={model}",
        "limits.max_context=512",
        "server.grpc=127.0.0.1:0",
        "server.health=127.0.0.1:0",
    ]
    arguments = [part for override in overrides for part in ("--set", override)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, "serve", *arguments, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said = ""
    async with asyncio.timeout(40):
        while moment not in said:
            line = (await process.stderr.readline()).decode()
            assert line, f"ended early:\n{said}"
            said += line
        process.send_signal(signal.SIGTERM)
        said += (await process.stderr.read()).decode()
        assert await process.wait() == 0, said
    assert re.search("stopped by SIGTERM", said), said
    assert not children("ray")
