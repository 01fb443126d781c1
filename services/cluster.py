"""Ray as Paceline uses it: started here or joined, workers placed on it, and all of it ended.

No step passes through Ray: it places, finds and restarts workers.
"""

import asyncio
import logging
import signal
import threading
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.ports import WorkerLost
from protos.host import Health, Place, Recipe
from services.plan import Room
from services.preflight import LaunchError

log = logging.getLogger(__name__)

# Ray's least; no tensor and no token travels through its store.
STORE_BYTES = 80 * 2**20
# A worker that dies more often than this is broken.
MAX_RESTARTS = 100
STOP_S = 10.0
# Longer than any piece of work, whose link has ended before.
STUCK_S = 30.0
# Ray ends a process that hangs some seconds after it was told to.
KILL_S = 20.0


class WorkerActor(Protocol):
    """What the actors of both worker packages offer."""

    async def start(self, secret: str) -> str: ...

    async def describe(self) -> Health: ...

    async def until_end(self) -> None: ...

    async def stop(self) -> bool: ...


@asynccontextmanager
async def ray_running(address: str, num_cpus: int, timeout_s: float) -> AsyncIterator[None]:
    """Ray with at least `num_cpus`, started here or joined at `address`. Raises LaunchError."""
    started: Future[None] = Future()
    ended: Future[None] = Future()
    over = threading.Event()

    def keep() -> None:
        try:
            _init(address, num_cpus)
            started.set_result(None)
            over.wait()
            ray.shutdown()
        except BaseException as error:
            # Whoever waits for this thread gets it, whatever it is; after the start, the log.
            if started.done():
                raise
            started.set_exception(error)
        finally:
            ended.set_result(None)

    # Ray's processes die with the thread that started them, so one thread stays with them. It is
    # a daemon: a start that hangs does not keep this process.
    threading.Thread(target=keep, name="ray", daemon=True).start()
    try:
        await _wait_for_start(started, address, timeout_s)
        _take_signals_back()
        yield
    finally:
        over.set()
        await asyncio.wait({asyncio.wrap_future(ended)}, timeout=STOP_S)


async def _wait_for_start(started: Future[None], address: str, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(started)), timeout_s)
    except TimeoutError:
        raise LaunchError(
            f"{_cannot(address)}: no answer after {timeout_s:g} s; raise cluster.start_timeout_s "
            "or look at Ray's logs"
        ) from None


def _cannot(address: str) -> str:
    return f"cannot join Ray at {address}" if address else "cannot start Ray here"


def _init(address: str, num_cpus: int) -> None:
    here = not address
    try:
        ray.init(
            address=address or "local",
            num_cpus=num_cpus if here else None,
            object_store_memory=STORE_BYTES if here else None,
            include_dashboard=False if here else None,
            namespace=f"paceline-{uuid.uuid4().hex}",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (OSError, RayError, RuntimeError, ValueError) as error:
        raise LaunchError(f"{_cannot(address)}: {error}") from error


def _take_signals_back() -> None:
    """Ray lays handlers under Python's that print a stack; set Python's own again."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))
            signal.siginterrupt(number, False)


@asynccontextmanager
async def reserved(
    rooms: Sequence[Room], timeout_s: float, *, here: bool
) -> AsyncIterator[PlacementGroup]:
    """A place for one worker per room, on this node or any. Raises LaunchError.

    The actors in it end with it.
    """
    bundles = [room.bundle for room in rooms]
    # A cluster may grow; this node will not.
    timeout_s = timeout_s if not here or _would_fit(bundles) else 0.0
    group = placement_group(bundles, strategy="STRICT_PACK" if here else "PACK")
    try:
        await _wait_for_room(group, timeout_s)
        yield group
    finally:
        if not here:  # Where Ray itself ends, so does everything in it.
            removing = asyncio.to_thread(remove_placement_group, group)
            with suppress(TimeoutError):
                await asyncio.wait_for(removing, STOP_S)


def _would_fit(bundles: Sequence[dict[str, float]]) -> bool:
    """True if the cluster, were it idle, had enough of everything."""
    has = ray.cluster_resources()  # type: ignore[no-untyped-call]
    kinds = {kind for bundle in bundles for kind in bundle}
    return all(sum(b.get(kind, 0) for b in bundles) <= has.get(kind, 0) for kind in kinds)


async def _wait_for_room(group: PlacementGroup, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(group.ready(), timeout_s)
    except TimeoutError:
        has = ray.cluster_resources()  # type: ignore[no-untyped-call]
        raise LaunchError(
            f"no room for the workers after {timeout_s:g} s: they need {group.bundle_specs}, the"
            f" cluster has {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs; add nodes,"
            " lower tp or replicas, or change device or cores"
        ) from None


class Worker:
    """One placed actor: it is found again after a restart.

    It is looked for when its link has ended. If its process lives then and does not answer for
    `silent_s`, or its engine is stuck in what it did for the link, it is restarted.
    """

    def __init__(
        self, name: str, actor: ActorHandle[WorkerActor], secret: str, silent_s: float
    ) -> None:
        self.name = name
        self._actor = actor
        self._secret = secret
        self._silent_s = silent_s
        self._life: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._kill_again_at = 0.0

    async def start(self) -> None:
        """Until it has loaded. Raises LaunchError with the worker's own reason."""
        try:
            await self._start()
        except RayTaskError as error:
            raise LaunchError(f"{self.name} could not be started: {error.cause}") from error
        except RayActorError as error:
            raise LaunchError(f"{self.name} died while it started: {error}") from error
        except RayError as error:
            raise LaunchError(f"{self.name} could not be started: {error}") from error

    async def locate(self) -> str:
        """Its present address. Raises WorkerLost."""
        try:
            await self._end_if_stuck()
            return await self._start()
        except RayTaskError as error:
            raise WorkerLost(f"{self.name} cannot load: {error.cause}") from error
        except RayActorError as error:
            raise WorkerLost(f"{self.name} is dead: {error}") from error
        except RayError as error:
            raise WorkerLost(f"{self.name} cannot be found: {error}") from error

    async def _start(self) -> str:
        address = str(await self._actor.start.remote(self._secret))
        if not self._is_stopped and (self._life is None or self._life.done()):
            self._life = asyncio.create_task(self._live())
        return address

    async def _live(self) -> None:
        """For as long as its process lives, and then say why it ended."""
        logs = "Ray's logs may say more"
        try:
            health: Health = await self._actor.describe.remote()
            logs = f"worker-*-{health.pid}.err of Ray's logs is its own"
            await self._actor.until_end.remote()
        except RayError as error:
            why = f"{type(error).__name__}: {error}"
            log.error("the process of %s has ended; %s (%s)", self.name, logs, why)

    async def _end_if_stuck(self) -> None:
        """A process that lives, as far as Ray knows, and is of no use is in the way."""
        if self._life is None or self._life.done():
            return
        try:
            health: Health = await asyncio.wait_for(self._actor.describe.remote(), self._silent_s)
        except TimeoutError:
            self._kill("does not answer")
        else:
            if health.busy_s > STUCK_S:
                self._kill(f"has been at one piece of work for {health.busy_s:.0f} s")

    def _kill(self, why: str) -> None:
        """End its process, so that Ray starts another. Raises WorkerLost."""
        now = asyncio.get_running_loop().time()
        if now >= self._kill_again_at:
            # Once is enough for one process: a second time it might be the next one.
            self._kill_again_at = now + KILL_S
            log.error("%s %s; its process is killed to be restarted", self.name, why)
            ray.kill(self._actor, no_restart=False)
        raise WorkerLost(f"{self.name} {why} and is restarted")

    async def stop(self) -> None:
        """End its session and engine; the process ends with the room it has."""
        self._is_stopped = True
        if self._life is not None:
            self._life.cancel()
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._actor.stop.remote(), STOP_S)


class Placer:
    """Puts actors into the bundles of a group, in order; all share one secret."""

    def __init__(self, group: PlacementGroup, secret: str, silent_s: float) -> None:
        self._group = group
        self._secret = secret
        self._silent_s = silent_s
        self._next = 0

    def place(self, actor: type, name: str, recipe: Recipe, place: Place) -> Worker:
        """The next bundle's worker."""
        index, self._next = self._next, self._next + 1
        strategy = PlacementGroupSchedulingStrategy(self._group, index)
        options: dict[str, object] = {
            "num_cpus": self._group.bundle_specs[index]["CPU"],
            "num_gpus": self._group.bundle_specs[index].get("GPU", 0),
            "max_restarts": MAX_RESTARTS,
            "max_task_retries": 0,
            "scheduling_strategy": strategy,
        }
        placed: object = ray.remote(actor).options(**options).remote(recipe, place)
        handle = cast(ActorHandle[WorkerActor], placed)
        return Worker(name, handle, self._secret, self._silent_s)
