"""What an actor holds: an engine in its thread, its cores, and the server of its sessions.

Knows neither Ray nor any engine: the engine's builder is named by its import path.
"""

import asyncio
import os
import pkgutil
import secrets
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from protos.engine_thread import EngineThread, LinkLimits
from protos.session import SessionServer
from protos.worker import Engine

LOOPBACK = "127.0.0.1"
# A compute thread that holds the interpreter delays the loop by no more than this.
SWITCH_INTERVAL_S = 0.0005
# Rounds an idle OpenMP thread spins before it sleeps: a few microseconds.
SPIN_COUNT = 2000
EXIT_ENGINE_DEAD = 70


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an engine is built: `package.module:function`, called with `options` and `incarnation`.

    The options are plain values and frozen values of the builder's package.
    """

    builder: str
    options: Mapping[str, object] = field(default_factory=dict)

    def build(self) -> Engine:
        """Import the builder and call it; the incarnation is new at every call."""
        builder = pkgutil.resolve_name(self.builder)
        engine: Engine = builder(**self.options, incarnation=secrets.randbits(62))
        return engine


@dataclass(frozen=True, slots=True)
class Place:
    """The CPU cores a worker may use (none named: all), its link's bounds, where it listens.

    An empty `host` is the node's own address.
    """

    cores: tuple[int, ...] = ()
    limits: LinkLimits = field(default_factory=LinkLimits)
    host: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """A worker's account of itself: `state` is new, loading, ready, stopped or dead.

    Its engine has been at one piece of work for `busy_s`.
    """

    pid: int
    state: str
    address: str = ""
    cores: tuple[int, ...] = ()
    busy_s: float = 0.0


class WorkerHost:
    """One worker's process: it keeps to its cores, and ends if its engine can serve no more."""

    def __init__(self, recipe: Recipe, place: Place) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        pin(place.cores)
        tune_libraries(len(place.cores))
        self._recipe = recipe
        self._place = place
        self._engine: EngineThread | None = None
        self._server: SessionServer | None = None
        self._starting: asyncio.Task[str] | None = None
        self._address = ""

    async def start(self, secret: str, node: str) -> str:
        """Build the engine, then listen at `node` or its place; the address, also if called again.

        Raises what the builder raised.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(secret, self._place.host or node))
        return await asyncio.shield(self._starting)

    def health(self) -> Health:
        """This process's id and state; never waits."""
        busy_s = 0.0 if self._engine is None else self._engine.busy_s
        return Health(os.getpid(), self._state(), self._address, tuple(own_cores()), busy_s)

    async def stop(self) -> bool:
        """End the session and the engine; False if a piece of work still runs after its bound."""
        if self._server is not None:
            await self._server.stop()
        return self._engine is None or await asyncio.to_thread(self._engine.stop)

    async def _start(self, secret: str, host: str) -> str:
        self._engine = EngineThread(self._recipe.build, self._place.limits)
        await asyncio.wrap_future(self._engine.ready)
        self._engine.finished.add_done_callback(_exit_if_dead)
        self._server = SessionServer(self._engine, secret, self._place.limits)
        self._address = await self._server.start(host)
        return self._address

    def _state(self) -> str:
        if self._engine is None:
            return "new"
        if not self._engine.closed:
            return "ready" if self._address else "loading"
        ended = self._engine.finished
        return "dead" if ended.done() and ended.exception() is not None else "stopped"


def tune_libraries(num_threads: int) -> None:
    """Let OpenMP's idle threads soon sleep, and have so many of them (0: as many as it likes);
    let torch take large memory in huge pages.

    Spinning for long, as they do by default, they made a step many times slower while another
    process used their cores; sleeping at once costs a sixth of a step on idle cores. Huge pages
    save a tenth of a step at long contexts. All is read when a library is loaded, so this comes
    before torch.
    """
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    if num_threads:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def own_cores() -> list[int]:
    """The cores this process may use; none where that cannot be told."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def pin(cores: tuple[int, ...]) -> None:
    """Keep every thread of this process, and those they start, on `cores` (Linux; none: all).

    Raises ValueError for cores this machine does not have.
    """
    if not cores or sys.platform != "linux":
        return
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue  # It has just ended.
        except OSError as error:
            raise ValueError(f"cannot run on cores {cores}: {error.strerror}") from error


def _exit_if_dead(finished: Future[None]) -> None:
    """The process is of no use without its engine: end it, so that another is started."""
    if finished.exception() is not None:
        os._exit(EXIT_ENGINE_DEAD)
