"""Workers under Ray: they start, answer over their streams, are found again after a death, end."""

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from typing import cast

import pytest
import ray
from ray.actor import ActorHandle

from drafter_workers.actor import DrafterActor
from orchestrator.ports import WorkerLost
from orchestrator.stream_port import Locate, StreamPort
from protos.engine_thread import LinkLimits
from protos.host import Health, Place, Recipe
from protos.messages import Audit, AuditReply, Grow, Hello, Message, Open
from protos.sampling import GREEDY
from protos.worker import Engine
from target_workers.actor import TargetActor
from tests.fakes import ToyEngine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(60)]

Worker = TargetActor | DrafterActor

SECRET = "secret"
TOY = Recipe("tests.fakes:toy_engine")
FIRST_CORE = min(os.sched_getaffinity(0)) if sys.platform == "linux" else 0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace=uuid.uuid4().hex,
    )
    yield
    ray.shutdown()


def actor(cls: type, recipe: Recipe = TOY, restarts: int = 1) -> ActorHandle[Worker]:
    options = {
        "num_cpus": 0.1,
        "max_restarts": restarts,
        "max_task_retries": 0,
    }
    place = Place((FIRST_CORE,), LinkLimits(keepalive_s=1.0))
    placed: object = ray.remote(cls).options(**options).remote(recipe, place)
    return cast(ActorHandle[Worker], placed)


def locate(worker: ActorHandle[Worker]) -> Locate:
    async def address() -> str:
        try:
            return str(await worker.start.remote(SECRET))
        except ray.exceptions.RayActorError as error:
            raise WorkerLost(str(error)) from error

    return address


async def health(worker: ActorHandle[Worker]) -> Health:
    found: Health = await asyncio.wait_for(worker.describe.remote(), 10)
    return found


async def connected(port: StreamPort, within_s: float = 20.0) -> Hello:
    """The Hello, once the worker is there."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                await port.connect()
                hello = await port.receive()
            except WorkerLost:
                await asyncio.sleep(0.05)
                continue
            assert isinstance(hello, Hello)
            return hello


async def ended(pid: int, within_s: float) -> None:
    """Until a process has ended. Raises TimeoutError."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(process, over.set)
    try:
        await asyncio.wait_for(over.wait(), within_s)
    finally:
        asyncio.get_running_loop().remove_reader(process)
        os.close(process)


@pytest.mark.parametrize("cls", [TargetActor, DrafterActor])
async def test_a_worker_starts_answers_and_stops(cls: type) -> None:
    worker = actor(cls)
    port = StreamPort("toy", locate(worker), SECRET, LinkLimits(connect_s=20.0))
    await port.connect()
    assert isinstance(await port.receive(), Hello)
    port.send(Open(1, 1, (5, 6), GREEDY, credit=2))
    assert isinstance(await port.receive(), Grow)
    assert isinstance(await port.receive(), Grow)
    found = await health(worker)
    assert (found.state, found.cores) == ("ready", (FIRST_CORE,))
    assert await worker.stop.remote()
    with pytest.raises(WorkerLost, match="toy: "):
        await asyncio.wait_for(port.receive(), 5)
    assert (await health(worker)).state == "stopped"
    ray.kill(worker)
    await ended(found.pid, within_s=5)
    await port.close()


async def test_a_killed_worker_is_lost_at_once_and_found_again() -> None:
    worker = actor(TargetActor)
    port = StreamPort("toy", locate(worker), SECRET, LinkLimits(connect_s=20.0))
    first = await connected(port)
    pid = (await health(worker)).pid
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(WorkerLost, match="toy: "):
        await asyncio.wait_for(port.receive(), 5)
    assert time.monotonic() - killed < 2.0
    second = await connected(port)
    assert second.incarnation != first.incarnation
    assert (await health(worker)).pid != pid
    port.send(Audit(1))
    assert await port.receive() == AuditReply(1, 8, 8, 0)
    await port.close()
    ray.kill(worker)


async def test_a_worker_that_may_not_restart_stays_lost() -> None:
    worker = actor(DrafterActor, restarts=0)
    port = StreamPort("toy", locate(worker), SECRET, LinkLimits(connect_s=20.0))
    await connected(port)
    os.kill((await health(worker)).pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(port.receive(), 5)
    with pytest.raises(WorkerLost, match="actor died"):
        await port.connect()


async def test_a_worker_that_cannot_be_built_says_why() -> None:
    worker = actor(DrafterActor, Recipe("tests.fakes:toy_engine", {"nonsense": 1}))
    with pytest.raises(ray.exceptions.RayTaskError, match="nonsense"):
        await worker.start.remote(SECRET)
    assert (await health(worker)).state == "dead"
    ray.kill(worker)


async def test_idle_threads_of_a_worker_sleep() -> None:
    worker = actor(TargetActor, Recipe("tests.integration.test_ray_workers:openmp_engine"))
    port = StreamPort("toy", locate(worker), SECRET, LinkLimits(connect_s=20.0))
    assert (await connected(port)).model_hash == "threads: 1, idle: 2000"
    await port.close()
    ray.kill(worker)


async def test_describe_answers_while_the_engine_computes() -> None:
    worker = actor(TargetActor, Recipe("tests.integration.test_ray_workers:busy_engine"))
    port = StreamPort("toy", locate(worker), SECRET, LinkLimits(connect_s=20.0))
    await connected(port)
    port.send(Audit(1))
    computing = asyncio.create_task(port.receive())
    for _ in range(5):
        started = time.monotonic()
        await health(worker)
        assert time.monotonic() - started < 0.2
    assert not computing.done(), "the engine was busy all the time"
    await port.close()
    ray.kill(worker)
    await asyncio.gather(computing, return_exceptions=True)


def openmp_engine(incarnation: int) -> Engine:
    """A toy engine whose model is what OpenMP was told."""
    engine = ToyEngine(incarnation)
    told = f"threads: {os.environ['OMP_NUM_THREADS']}, idle: {os.environ['GOMP_SPINCOUNT']}"
    engine.said = dataclasses.replace(engine.said, model_hash=told)
    return engine


def busy_engine(incarnation: int) -> Engine:
    """The builder of a Busy engine."""
    return Busy(incarnation)


class Busy(ToyEngine):
    """A toy engine that computes in Python for a second per message."""

    def handle(self, message: Message) -> list[Message]:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            sum(range(1000))
        return super().handle(message)
