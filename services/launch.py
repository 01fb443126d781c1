"""The composition root: checks a configuration, starts every part in order, ends them in reverse.

Nothing is started before what cannot work was refused; what was started is ended, also when the
start fails or is interrupted half way.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import drafter_workers.config
import target_workers.config
from drafter_workers.config import GrowthConfig
from orchestrator.core import Core
from orchestrator.k_policy import FixedK
from orchestrator.ports import WorkerPort
from orchestrator.runtime import Runtime
from protos.host import LOOPBACK, Recipe, own_cores
from services.config import Config
from services.decisions import decisions
from services.errors import ConfigError
from services.lifecycle import until_signal, watched
from services.memory_plan import Demand, MemoryPlan, plan_memory
from services.plan import Plan, Room, Seat, core_config, share_out
from services.preflight import LaunchError, Models, check, memory_bytes
from services.server import Server
from services.shapes import check_borrowed, check_kernels, holders
from services.text import make_stopper
from services.translate import Served
from target_workers.model.config import ModelConfig, ModelError
from target_workers.model.kernel_cache import kept_in, why_not_kept
from target_workers.model.shard import Shard, described

Say = Callable[[str], object]

# The drafting methods by name, as `drafter_workers.methods` has them; that module needs torch.
METHODS = ("small_model",)
# How much longer a start waits for drafters that are not required.
OPTIONAL_S = 5.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked configuration and what it leaves open: seats, and what memory is for."""

    config: Config
    models: Models
    shapes: tuple[ModelConfig, ...]
    plan: Plan
    max_context: int
    memory: MemoryPlan

    def recipe(self, seat: Seat) -> Recipe:
        """How the seat's engine is built, in its own process or here."""
        is_target = seat in self.plan.target_seats
        name, settings = self._target(seat) if is_target else self._drafter(seat)
        vocab_hash = self.models.tokenizer.vocab_hash
        return Recipe(name, {"config": settings, "vocab_hash": vocab_hash})

    def _target(self, seat: Seat) -> tuple[str, object]:
        target, cluster = self.config.target, self.config.cluster
        return "target_workers.forward:load_target", target_workers.config.TargetConfig(
            path=str(self.models.target),
            device=target.device,
            dtype=target.dtype,
            kv_dtype=target.kv_dtype,
            weight_dtype=target.weight_dtype,
            exact=target.is_exact,
            page_size=target.page_size,
            num_pages=self.memory.num_pages,
            max_rows=self.config.limits.step_rows,
            max_context=self.max_context,
            vocab_size=self.models.tokenizer.vocab_size,
            threads=tuple(sorted({self.plan.cores_alone, self.plan.cores_shared} - {0})),
            shard=Shard(seat.rank, target.tp),
            host="" if cluster.address else LOOPBACK,
            rank_timeout_s=cluster.rank_timeout_s,
        )

    @property
    def needed(self) -> list[frozenset[str]]:
        """The names of the drafters in every required group: one of each is needed to be ready."""
        return [
            frozenset(seat.name for seat in self.plan.drafters if seat.group == group)
            for group in sorted({seat.group for seat in self.plan.drafters})
            if self.config.drafter[group].required
        ]

    def _drafter(self, seat: Seat) -> tuple[str, object]:
        drafter = self.config.drafter[seat.group]
        shape = self.shapes[1 + seat.group]
        tree = self.config.speculation.shape == "tree"
        return "drafter_workers.loading:load_drafter", drafter_workers.config.DrafterConfig(
            path=str(self.models.drafters[seat.group]),
            method=METHODS[0] if drafter.method == "auto" else drafter.method,
            device=drafter.device,
            dtype=self.config.target.dtype,
            num_slots=self.memory.tokens,
            max_context=min(self.max_context, shape.max_context),
            vocab_size=min(
                shape.vocab_size, self.shapes[0].vocab_size, self.models.tokenizer.vocab_size
            ),
            rank=drafter.rank,
            lender=str(self.models.target),
            weight_dtype=drafter.weight_dtype,
            growth=GrowthConfig(width=2 if tree else 1),
        )


@dataclass(frozen=True, slots=True)
class Service:
    """What runs: where clients and probes reach it, and the orchestrator behind it."""

    address: str
    health_address: str
    runtime: Runtime


def prepare(config: Config) -> Prepared:
    """Check all of it and decide what is left open. Raises ConfigError; starts nothing."""
    models = check(config, METHODS)
    here = not config.cluster.address
    shapes = tuple(_shape(folder) for folder in (models.target, *models.drafters))
    check_kernels(config.target, shapes[0])
    check_borrowed(models)
    plan = share_out(config, own_cores() if here else ())
    max_context = min(config.limits.max_context, shapes[0].max_context)
    kept, demand = holders(config, plan, shapes, models.drafters), Demand.of(config, max_context)
    memory = plan_memory(kept, demand, memory_bytes() if here else None)
    return Prepared(config, models, shapes, plan, max_context, memory)


@asynccontextmanager
async def launched(config: Config, say: Say) -> AsyncIterator[Service]:
    """Everything running and ready, for as long as the context lasts.

    `say` hears a line for each stage. Raises ConfigError, LaunchError once something started, and
    ServiceFailed when a bug ends it.
    """
    began = asyncio.get_running_loop().time()
    prepared = await asyncio.to_thread(prepare, config)
    said = decisions(config, prepared.plan, prepared.memory)
    for line in (*said, *_parts(prepared), *_kernels(prepared)):
        say(line)
    async with AsyncExitStack() as stack:
        target, drafters = await _start_workers(prepared, stack, say)
        runtime = Runtime(_core(prepared), [target], drafters)
        stack.push_async_callback(runtime.stop)
        await runtime.start()
        await _wait_ready(runtime, prepared)
        server = Server(
            _served(prepared, runtime), runtime, config.server, config.limits.max_request_s
        )
        stack.push_async_callback(server.stop)
        await server.start()
        await server.set_ready(is_ready=True)
        await stack.enter_async_context(watched(server, runtime, prepared.needed))
        service = Service(
            _address(config.server.grpc, server.port),
            _address(config.server.health, server.health_port),
            runtime,
        )
        took_s = asyncio.get_running_loop().time() - began
        say(f"serving {config.model.served_name} at {service.address} after {took_s:.1f} s")
        yield service


async def serve(config: Config, say: Say) -> None:
    """Serve until SIGINT or SIGTERM, then let streams end within the drain time.

    A second signal cuts the drain short. No process is left either way.
    """
    await until_signal(_serve(config, say), say)


async def _serve(config: Config, say: Say) -> None:
    async with launched(config, say):
        await asyncio.Event().wait()


async def _start_workers(
    prepared: Prepared, stack: AsyncExitStack, say: Say
) -> tuple[WorkerPort, list[WorkerPort]]:
    """The ports of the target and of the drafters that could be loaded."""
    _guard_ray(prepared.config.cluster.address)
    from drafter_workers.actor import DrafterActor
    from services.crew import Member, as_one, muster
    from target_workers.actor import TargetActor

    plan, recipe = prepared.plan, prepared.recipe
    target_room = Room.on(max(1, plan.cores_shared), prepared.config.target.device)
    crew = [Member(i, TargetActor, recipe(i), True, target_room) for i in plan.target_seats]
    for seat in plan.drafters:
        drafter = prepared.config.drafter[seat.group]
        room = Room.on(max(1, len(seat.cores)), drafter.device)
        crew.append(Member(seat, DrafterActor, recipe(seat), drafter.required, room))
    ports = await muster(crew, prepared.config.cluster, stack, say)
    ranks, drafters = ports[: len(plan.target_seats)], ports[len(plan.target_seats) :]
    target = as_one(plan.target.name, ranks, prepared.config.cluster)
    return target, [port for port in drafters if port is not None]


def _guard_ray(address: str) -> None:
    """Let nobody into a Ray that is started here without a token; Ray reads it when imported."""
    if not address and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def _core(prepared: Prepared) -> Core:
    settings = core_config(prepared.config, prepared.plan, prepared.max_context)
    stopper = partial(make_stopper, prepared.models.tokenizer)
    return Core(settings, FixedK(prepared.config.speculation.fixed_k), stopper)


def _served(prepared: Prepared, runtime: Runtime) -> Served:
    """What clients are told; the revision is the target's own word."""
    revision = runtime.core.targets.targets[0].hello.model_hash
    name = prepared.config.model.served_name
    return Served(
        name,
        revision,
        prepared.max_context,
        prepared.models.tokenizer,
        prepared.config.speculation.allow_lossy,
    )


async def _wait_ready(runtime: Runtime, prepared: Prepared) -> None:
    """Wait for the target and the required drafters, and a little for the others."""
    required = frozenset({prepared.plan.target.name}).union(*prepared.needed)
    optional = {seat.name for seat in prepared.plan.drafters} - required
    try:
        await runtime.wait_ready(prepared.config.cluster.start_timeout_s, optional=optional)
    except TimeoutError as error:
        raise LaunchError(f"{error}; raise cluster.start_timeout_s") from error
    with suppress(TimeoutError):
        await runtime.wait_ready(OPTIONAL_S)


def _parts(prepared: Prepared) -> list[str]:
    """What each rank of the target holds, where there are several."""
    shards = [(seat, Shard(seat.rank, len(prepared.plan.ranks))) for seat in prepared.plan.ranks]
    return [f"{seat.name} holds {described(prepared.shapes[0], shard)}" for seat, shard in shards]


def _kernels(prepared: Prepared) -> list[str]:
    """Why kernels that run here cannot be kept, which a worker says in its log alone."""
    config = prepared.config
    devices = (config.target.device, *(each.device for each in config.drafter))
    pairs = zip(prepared.shapes, devices, strict=False)  # drafters may be no source
    on_cpu = [shape for shape, device in pairs if device == "cpu"]
    if config.cluster.address or not any(s.has_kernels(config.target.dtype) for s in on_cpu):
        return []
    cause = why_not_kept(kept_in())
    return [f"kernels cannot be kept ({cause}): each start compiles them anew"] if cause else []


def _shape(folder: Path) -> ModelConfig:
    try:
        return ModelConfig.from_folder(folder)
    except ModelError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _address(configured: str, port: int) -> str:
    """The address that was listened on, a free port filled in; empty if none was."""
    return f"{configured.rpartition(':')[0]}:{port}" if configured else ""
