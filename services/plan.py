"""Which worker computes where, and how much each may hold. Pure: the machine comes as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from orchestrator.config import CoreConfig
from orchestrator.request import Mode
from services.config import MAX_K, Config
from services.errors import ConfigError

# Of the cores: what the drafters get together, where there are enough of them.
DRAFTERS_SHARE = 4


@dataclass(frozen=True, slots=True)
class Room:
    """What one worker asks of Ray."""

    num_cpus: int
    num_gpus: int = 0

    @classmethod
    def on(cls, num_cpus: int, device: str) -> Self:
        """A worker's on a device: a GPU to itself, if it is one."""
        return cls(num_cpus, num_gpus=int(device == "cuda"))

    @property
    def bundle(self) -> dict[str, float]:
        """The amounts by Ray's names."""
        gpus = {"GPU": float(self.num_gpus)} if self.num_gpus else {}
        return {"CPU": float(self.num_cpus), **gpus}


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker computes: a process of its own on `cores` (none: any), or the orchestrator's.

    `group` is the index of its [[drafter]] in the configuration, `rank` that of a part of the
    target.
    """

    name: str
    cores: tuple[int, ...] = ()
    in_process: bool = False
    group: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Every worker's seat. The target may use all its cores while no drafter works (`cores_alone`).

    A target in several pieces has a seat in `ranks` for each, which share out its cores; the
    numbers are then those of one rank. The orchestrator keeps to no core: it runs on whichever a
    worker has left idle.
    """

    target: Seat
    drafters: tuple[Seat, ...] = ()
    cores_alone: int = 0
    cores_shared: int = 0
    ranks: tuple[Seat, ...] = ()

    @property
    def target_seats(self) -> tuple[Seat, ...]:
        """The processes of the target, the first rank's first."""
        return self.ranks or (self.target,)

    @property
    def processes(self) -> tuple[Seat, ...]:
        """The seats that are processes of their own, the target's first."""
        return (*self.target_seats, *(seat for seat in self.drafters if not seat.in_process))


def share_out(config: Config, cores: Sequence[int]) -> Plan:
    """A seat for every worker on this machine's `cores` (none: the workers are elsewhere).

    With one core, drafters share the orchestrator's process. Raises ConfigError.
    """
    _check_cores(config, cores)
    target = config.target.cores or tuple(cores)
    seats = tuple(_drafters(config, cores))
    taken = {core for seat in seats for core in seat.cores}
    rest = tuple(core for core in target if core not in taken) or target[:1]
    plan = Plan(
        Seat("target", target),
        seats,
        cores_alone=len(target),
        cores_shared=len(rest),
    )
    return plan if config.target.tp == 1 else _split(plan, config.target.tp, rest)


def _split(plan: Plan, tp: int, rest: tuple[int, ...]) -> Plan:
    """The plan with the target's cores shared out to its ranks, at least one to each.

    Every rank gets as many of `rest`, which no drafter uses, if there are enough.
    """
    cores = plan.target.cores
    shared = tuple(core for core in cores if core not in rest)
    parts = [_piece(rest, tp, i) + _piece(shared, tp, i) for i in range(tp)]
    if len(rest) < tp:
        parts = [_piece((*rest, *shared), tp, i) for i in range(tp)]
    if 0 < len(cores) < tp:
        parts = [(cores[i % len(cores)],) for i in range(tp)]
    seats = tuple(Seat(f"target rank {i}", part, rank=i) for i, part in enumerate(parts))
    alone = min(map(len, parts))
    return replace(
        plan, ranks=seats, cores_alone=alone, cores_shared=min(alone, -(-len(rest) // tp))
    )


def _piece(cores: tuple[int, ...], pieces: int, index: int) -> tuple[int, ...]:
    """Neighbouring cores, about as many for each of so many pieces."""
    return cores[len(cores) * index // pieces : len(cores) * (index + 1) // pieces]


def guesses_per_sequence(config: Config) -> int:
    """The most cache rows that guesses of one sequence may take at a worker."""
    return max(MAX_K, config.speculation.credit)


def _drafters(config: Config, cores: Sequence[int]) -> list[Seat]:
    if "drafter" not in config.speculation.sources:
        return []
    groups = [
        group for group, drafter in enumerate(config.drafter) for _ in range(drafter.replicas)
    ]
    free = [group for group in groups if not config.drafter[group].cores]
    shares = iter(_shares(config, cores, len(free)))
    seats = []
    for index, group in enumerate(groups):
        fixed = config.drafter[group].cores
        chosen = fixed or next(shares)
        alone = bool(fixed) or len(cores) != 1
        seats.append(Seat(f"drafter-{index}", chosen, in_process=not alone, group=group))
    return seats


def _shares(config: Config, cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Cores for `count` drafters that name none: apart from the target's, or the last of them."""
    if not count or not cores:
        return [()] * count
    fixed = {core for drafter in config.drafter for core in drafter.cores}
    pool = [core for core in cores if core not in fixed] or list(cores)
    apart = [core for core in pool if core not in config.target.cores]
    if not config.target.cores or not apart:
        size = max(count, len(pool) // DRAFTERS_SHARE)
        apart = pool[-min(size, max(1, len(pool) - 1)) :]
    each = max(1, len(apart) // count)
    return [tuple(apart[(i * each + j) % len(apart)] for j in range(each)) for i in range(count)]


def _check_cores(config: Config, cores: Sequence[int]) -> None:
    named = [("target.cores", config.target.cores)]
    named += [(f"drafter.{i}.cores", drafter.cores) for i, drafter in enumerate(config.drafter)]
    for key, chosen in named:
        missing = sorted(set(chosen) - set(cores)) if cores else []
        if missing:
            raise ConfigError(f"{key}: this process has no core {missing[0]}, only {list(cores)}")


def core_config(config: Config, plan: Plan, max_context: int) -> CoreConfig:
    """What the orchestrator's core is configured with."""
    speculation = config.speculation
    return CoreConfig(
        max_sequences=config.limits.max_sequences,
        max_queue=config.limits.max_queue,
        max_context=max_context,
        max_request_s=config.limits.max_request_s,
        step_rows=config.limits.step_rows,
        mode=Mode(speculation.mode),
        k=speculation.fixed_k,
        shape="tree" if speculation.shape == "tree" else "chain",
        credit=speculation.credit,
        patience_s=speculation.patience_s,
        sync_patience_s=speculation.sync_patience_s,
        lookup="lookup" in speculation.sources,
        recovery_s=config.cluster.waits_s,
        cores_alone=plan.cores_alone,
        cores_shared=plan.cores_shared,
    )
