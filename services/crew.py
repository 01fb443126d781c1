"""Starts the workers of a plan, as Ray actors or in this process, and gives their ports."""

import asyncio
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from orchestrator.local_port import LocalPort
from orchestrator.ports import WorkerLost, WorkerPort
from orchestrator.sharded_port import ShardedPort
from orchestrator.stream_port import StreamPort
from protos.engine_thread import LinkLimits
from protos.host import LOOPBACK, SWITCH_INTERVAL_S, Place, Recipe, tune_libraries
from services.cluster import Placer, Worker, ray_running, reserved
from services.config import ClusterConfig
from services.plan import Room, Seat
from services.preflight import LaunchError

# A drafter beside the orchestrator gives way to it and to the target.
IN_PROCESS_NICE = 10
# How much longer than for each other ranks get to form a group.
FORM_S = 2.0

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Member:
    """One worker: its seat and room, its actor's class, its engine's recipe, if it is required."""

    seat: Seat
    actor: type
    recipe: Recipe
    required: bool
    room: Room


async def muster(
    members: Sequence[Member], cluster: ClusterConfig, stack: AsyncExitStack, say: Say
) -> list[WorkerPort | None]:
    """Every member's port once it has loaded; None for one that could not and need not.

    What is started is ended by `stack`. Raises LaunchError.
    """
    # A silent worker is noticed within twice the time between pings.
    keepalive_s = cluster.rank_timeout_s / 2
    limits = LinkLimits(cluster.inbox, cluster.outbox, keepalive_s=keepalive_s)
    placed = [member for member in members if not member.seat.in_process]
    say(f"joining Ray at {cluster.address}" if cluster.address else "starting Ray")
    rooms = [member.room for member in placed]
    num_cpus = sum(room.num_cpus for room in rooms)
    running = ray_running(cluster.address, num_cpus, cluster.start_timeout_s)
    await stack.enter_async_context(running)
    room = reserved(rooms, cluster.start_timeout_s, here=not cluster.address)
    secret = secrets.token_hex(32)
    placer = Placer(await stack.enter_async_context(room), secret, limits.connect_s / 2)
    host = "" if cluster.address else LOOPBACK
    workers = {
        m.seat: placer.place(m.actor, m.seat.name, m.recipe, Place(m.seat.cores, limits, host))
        for m in placed
    }
    stack.push_async_callback(_stop, list(workers.values()))
    starts = [
        _join(m, workers[m.seat], secret, limits, say)
        if m.seat in workers
        else _host(m, limits, stack, say)
        for m in members
    ]
    try:
        async with asyncio.timeout(cluster.start_timeout_s):
            return await asyncio.gather(*starts)
    except TimeoutError:
        raise LaunchError(
            f"the workers have not loaded after {cluster.start_timeout_s:g} s; "
            "raise cluster.start_timeout_s or look at Ray's logs"
        ) from None


def as_one(name: str, ranks: Sequence[WorkerPort | None], cluster: ClusterConfig) -> WorkerPort:
    """One port over those of a target's ranks, all of them required."""
    ports = [port for port in ranks if port is not None]
    assert len(ports) == len(ranks), "every rank is required"
    if len(ports) == 1:
        return ports[0]
    placed = [port for port in ports if isinstance(port, StreamPort)]
    assert len(placed) == len(ports), "every rank is a process"
    return ShardedPort(name, placed, cluster.rank_timeout_s + FORM_S)


async def _join(
    member: Member, worker: Worker, secret: str, limits: LinkLimits, say: Say
) -> WorkerPort | None:
    """Wait for a placed worker to load."""
    cores = ", ".join(map(str, member.seat.cores)) or "any"
    say(f"{worker.name}: loading, cores {cores}")
    try:
        await worker.start()
    except LaunchError as error:
        _do_without(member, error, say)
        return None
    return StreamPort(worker.name, worker.locate, secret, limits)


async def _host(
    member: Member, limits: LinkLimits, stack: AsyncExitStack, say: Say
) -> WorkerPort | None:
    """Load a worker in this process, in a thread that gives way to the others."""
    say(f"{member.seat.name}: loading in the orchestrator's process, on its core")
    tune_libraries(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    port = LocalPort(member.seat.name, member.recipe.build, limits, IN_PROCESS_NICE)
    stack.push_async_callback(port.stop)
    try:
        await port.start()
    except WorkerLost as error:
        _do_without(member, LaunchError(str(error)), say)
        return None
    return port


def _do_without(member: Member, error: LaunchError, say: Say) -> None:
    if member.required:
        raise error
    say(f"{error}; serving without it")


async def _stop(workers: Sequence[Worker]) -> None:
    await asyncio.gather(*(worker.stop() for worker in workers))
