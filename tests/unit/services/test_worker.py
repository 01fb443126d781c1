"""A placed worker that is in the way is restarted, and only that one."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from ray.exceptions import RayActorError

from orchestrator.ports import WorkerLost
from protos.host import Health
from services import cluster
from services.cluster import Worker

READY = Health(7, "ready", "host:1")


class Call:
    """What Ray makes of an actor's method."""

    def __init__(self, method: Callable[..., Awaitable[object]]) -> None:
        self.remote = method


class ToyActor:
    """An actor whose process can end, hang, or be stuck in its engine."""

    def __init__(self) -> None:
        self.health = READY
        self.hangs = False
        self.ended = asyncio.Event()
        self.start = Call(self._start)
        self.describe = Call(self._describe)
        self.until_end = Call(self._until_end)

    async def _start(self, _secret: str) -> str:
        return self.health.address

    async def _describe(self) -> Health:
        if self.hangs:
            await asyncio.Event().wait()
        return self.health

    async def _until_end(self) -> None:
        await self.ended.wait()
        raise RayActorError


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The actors killed to be restarted."""
    found: list[object] = []

    def kill(actor: object, *, no_restart: bool) -> None:
        assert not no_restart
        found.append(actor)

    monkeypatch.setattr(cluster.ray, "kill", kill)
    return found


async def located() -> tuple[Worker, ToyActor]:
    actor = ToyActor()
    worker = Worker("toy", actor, "secret", silent_s=0.05)
    assert await worker.locate() == "host:1"
    await asyncio.sleep(0)  # it is watched from now on
    return worker, actor


async def test_a_worker_that_answers_is_left_alone(killed: list[object]) -> None:
    worker, _ = await located()
    assert await worker.locate() == "host:1"
    assert killed == []


async def test_a_worker_that_does_not_answer_is_restarted(killed: list[object]) -> None:
    worker, actor = await located()
    actor.hangs = True
    for _ in range(3):
        with pytest.raises(WorkerLost, match="toy does not answer and is restarted"):
            await worker.locate()
    assert killed == [actor], "once, for the next process needs its time"


async def test_a_worker_that_is_stuck_is_restarted(killed: list[object]) -> None:
    worker, actor = await located()
    actor.health = Health(7, "ready", "host:1", busy_s=cluster.STUCK_S + 1)
    with pytest.raises(WorkerLost, match="toy has been at one piece of work for 31 s"):
        await worker.locate()
    assert killed == [actor]


async def test_a_worker_that_died_is_left_to_ray(
    killed: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    worker, actor = await located()
    actor.ended.set()
    await asyncio.sleep(0.01)
    assert any("the process of toy has ended; worker-*-7.err" in m for m in caplog.messages)
    actor.hangs = True
    assert await worker.locate() == "host:1"
    assert killed == []


async def test_a_worker_that_never_was_up_may_take_its_time(killed: list[object]) -> None:
    actor = ToyActor()
    actor.hangs = True
    assert await Worker("toy", actor, "secret", silent_s=0.05).locate() == "host:1"
    assert killed == []
