"""Which worker computes where, and how much each may hold. Pure: the machine comes as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.config import MAX_K, Config
from services.errors import ConfigError

# Of the memory that the weights leave: the rest is for activations and the system.
CACHE_SHARE = 0.5
# Of the cores: what the drafters get together, where there are enough of them.
DRAFTERS_SHARE = 4


@dataclass(frozen=True, slots=True)
class Room:
    """What one worker asks of Ray."""

    num_cpus: int
    num_gpus: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """The amounts by Ray's names."""
        gpus = {"GPU": float(self.num_gpus)} if self.num_gpus else {}
        return {"CPU": float(self.num_cpus), **gpus}


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker computes: a process of its own on `cores` (none: any), or the orchestrator's.

    `group` is the index of its [[drafter]] in the configuration.
    """

    name: str
    cores: tuple[int, ...] = ()
    in_process: bool = False
    group: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Every worker's seat. The target may use all its cores while no drafter works (`cores_alone`).

    `own` are the cores of the orchestrator: the target's, which rests while the orchestrator works.
    """

    target: Seat
    drafters: tuple[Seat, ...] = ()
    cores_alone: int = 0
    cores_shared: int = 0
    own: tuple[int, ...] = ()

    @property
    def processes(self) -> tuple[Seat, ...]:
        """The seats that are processes of their own, the target's first."""
        return (self.target, *(seat for seat in self.drafters if not seat.in_process))


def share_out(config: Config, cores: Sequence[int]) -> Plan:
    """A seat for every worker on this machine's `cores` (none: the workers are elsewhere).

    With one core, drafters share the orchestrator's process. Raises ConfigError.
    """
    _check_cores(config, cores)
    target = config.target.cores or tuple(cores)
    seats = tuple(_drafters(config, cores))
    taken = {core for seat in seats for core in seat.cores}
    rest = tuple(core for core in target if core not in taken) or target[:1]
    return Plan(
        Seat("target", target),
        seats,
        cores_alone=len(target),
        cores_shared=len(rest),
        own=rest if cores else (),
    )


def cache_tokens(wanted: int, needed: int, token_bytes: int, free_bytes: int) -> int:
    """Tokens a cache may hold: those `wanted`, or what fits. Raises ConfigError below `needed`."""
    fitting = max(0, int(CACHE_SHARE * free_bytes)) // token_bytes
    if fitting < needed:
        raise ConfigError(
            f"limits.max_context: a cache of {needed} tokens takes {needed * token_bytes >> 20} MiB"
            f" and {max(0, free_bytes) >> 20} MiB are left beside the weights; lower it"
        )
    return min(wanted, fitting)


def tokens_per_sequence(config: Config, max_context: int) -> int:
    """The most cache rows one sequence may take at a worker, its guesses included."""
    return max_context + max(MAX_K, config.speculation.credit)


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
