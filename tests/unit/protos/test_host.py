"""What an actor holds, without Ray: one start however often it is asked, and a named end."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import pytest

from orchestrator.stream_port import StreamPort
from protos.host import EXIT_ENGINE_DEAD, Place, Recipe, WorkerHost, pin
from protos.messages import Hello
from tests.opened import LIMITS, SECRET, at

TOY = Recipe("tests.fakes:toy_engine")


@pytest.fixture
async def host() -> AsyncIterator[WorkerHost]:
    host = WorkerHost(TOY, Place(limits=LIMITS))
    yield host
    assert await host.stop()


async def test_every_start_gives_the_same_address(host: WorkerHost) -> None:
    assert host.health().state == "new"
    starts = [host.start(SECRET, "127.0.0.1") for _ in range(3)]
    addresses = {*await asyncio.gather(*starts)}
    assert {host.health().address} == addresses
    assert host.health().state == "ready"
    port = StreamPort("toy", at(*addresses), SECRET, LIMITS)
    await port.connect()
    assert isinstance(await port.receive(), Hello)
    await port.close()


async def test_a_cancelled_start_does_not_stop_the_others(host: WorkerHost) -> None:
    first = asyncio.create_task(host.start(SECRET, "127.0.0.1"))
    await asyncio.sleep(0)
    first.cancel()
    assert await host.start(SECRET, "127.0.0.1") == host.health().address


async def test_a_builder_that_fails_is_told_at_every_start() -> None:
    host = WorkerHost(Recipe("tests.fakes:toy_engine", {"nonsense": 1}), Place(limits=LIMITS))
    for _ in range(2):
        with pytest.raises(TypeError, match="nonsense"):
            await host.start(SECRET, "127.0.0.1")
    assert host.health().state == "dead"


async def test_a_builder_that_does_not_exist_is_named() -> None:
    host = WorkerHost(Recipe("tests.fakes:no_such_engine"), Place(limits=LIMITS))
    with pytest.raises(AttributeError, match="no_such_engine"):
        await host.start(SECRET, "127.0.0.1")


def test_every_build_is_another_incarnation() -> None:
    assert TOY.build().hello().incarnation != TOY.build().hello().incarnation


@pytest.mark.skipif(sys.platform != "linux", reason="core sets are Linux's")
def test_cores_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot run on cores \(1023,\)"):
        pin((1023,))


PINNED = """
import os, threading
from protos.host import pin
go_on, seen = threading.Event(), []
thread = threading.Thread(target=lambda: (go_on.wait(), seen.append(os.sched_getaffinity(0))))
thread.start()
core = min(os.sched_getaffinity(0))
pin((core,))
go_on.set()
thread.join()
assert seen == [{core}] == [os.sched_getaffinity(0)], seen
"""

CALM = """
import os
from protos.host import Place, Recipe, WorkerHost
WorkerHost(Recipe("tests.fakes:toy_engine"), Place((min(os.sched_getaffinity(0)),)))
import torch
assert torch.get_num_threads() == 1
"""

DYING = """
import asyncio
from protos.host import Place, Recipe, WorkerHost
from orchestrator.stream_port import StreamPort
from protos.engine_thread import LinkLimits
from tests.fakes import ToyEngine

class Stuck(ToyEngine):
    def reset(self):
        raise RuntimeError("planted")

async def main():
    host = WorkerHost(Recipe("__main__:Stuck"), Place())
    async def locate():
        return await host.start("secret", "127.0.0.1")
    port = StreamPort("toy", locate, "secret", LinkLimits())
    await port.connect()
    await port.close()
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="core sets are Linux's")
async def test_threads_that_run_already_are_pinned_too() -> None:
    code, stderr = await run(PINNED)
    assert code == 0, stderr


@pytest.mark.skipif(sys.platform != "linux", reason="core sets are Linux's")
async def test_openmp_gets_a_thread_per_core_and_lets_idle_ones_sleep() -> None:
    code, stderr = await run(CALM)
    assert code == 0, stderr
    assert "GOMP_SPINCOUNT = '2000'" in stderr


async def test_a_process_whose_engine_is_dead_ends() -> None:
    code, stderr = await run(DYING)
    assert code == EXIT_ENGINE_DEAD, stderr
    assert "planted" in stderr


async def run(script: str) -> tuple[int | None, str]:
    """Run a script in a process of its own; its exit code and standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_DISPLAY_ENV": "VERBOSE"},
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode, stderr.decode()
