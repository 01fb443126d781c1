"""What every worker will keep in memory, and how many pages are left for. Pure: numbers in, a plan.

A cache need not hold all sequences at full length, since the youngest wait when pages run out; it
must hold one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from services.config import Config
from services.errors import ConfigError
from services.plan import guesses_per_sequence

# Of the memory that weights and work leave: the rest is for the system and for what is not counted.
CACHE_SHARE = 0.5
# An interpreter with torch, Ray and compiled kernels in it.
PROCESS_BYTES = 384 << 20
WIDE = ("fp32", "fp64")


class Footprint(Protocol):
    """What one worker's part of a model takes, in bytes.

    Of keys and values (also were they int8), their copies and features: what one token takes.
    """

    @property
    def dtype(self) -> str: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    @property
    def int8_bytes(self) -> int: ...

    @property
    def copy_bytes(self) -> int: ...

    @property
    def feature_bytes(self) -> int: ...

    def work_bytes(self, rows: int, context: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Holder:
    """One worker: `shared` if its memory is that of this machine, else a device of its own.

    `target` if it is one of the target's, whose `kv_dtype` can be chosen.
    """

    name: str
    footprint: Footprint
    target: bool = False
    shared: bool = True

    def fixed_bytes(self, demand: "Demand") -> int:
        """What it takes beside its cache."""
        context = demand.max_context + demand.guesses
        work = self.footprint.work_bytes(demand.step_rows, context)
        return self.footprint.weights_bytes + PROCESS_BYTES + work

    @property
    def token_bytes(self) -> int:
        """What a token in its cache takes."""
        return self.footprint.kv_bytes + self.footprint.copy_bytes + self.footprint.feature_bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """What the caches are to hold: sequences of `max_context` tokens and `guesses` after them.

    `num_pages` 0: as many pages as that takes, if they fit.
    """

    max_sequences: int
    max_context: int
    guesses: int
    step_rows: int
    page_size: int
    num_pages: int = 0

    @classmethod
    def of(cls, config: Config, max_context: int) -> Self:
        """What a configuration asks for, of a model that takes `max_context` tokens or more."""
        return cls(
            config.limits.max_sequences,
            max_context,
            guesses_per_sequence(config),
            config.limits.step_rows,
            config.target.page_size,
            config.target.num_pages,
        )

    @property
    def sequence_pages(self) -> int:
        """The most pages of one sequence."""
        return -(-(self.max_context + self.guesses) // self.page_size)

    @property
    def wanted_pages(self) -> int:
        """Pages for all sequences at full length, unless their number is set."""
        return self.num_pages or self.max_sequences * self.sequence_pages


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pages that every cache gets. `host_bytes` is the memory here; None: not known before."""

    holders: tuple[Holder, ...]
    demand: Demand
    num_pages: int
    host_bytes: int | None

    @property
    def tokens(self) -> int:
        """The tokens of one cache."""
        return self.num_pages * self.demand.page_size

    def lines(self) -> list[str]:
        """The plan for people: a line for each worker, one for the sum, one for what it holds."""
        lines = [self._line(holder) for holder in self.holders]
        if self.host_bytes is not None:
            taken = sum(self._bytes(holder) for holder in self.holders if holder.shared)
            lines.append(f"memory planned: {human(taken)} of {human(self.host_bytes)} here")
        demand = self.demand
        whole = self.num_pages // demand.sequence_pages
        holds = f"caches hold {whole} of {demand.max_sequences} sequences of {demand.max_context}"
        rest = "" if whole >= demand.max_sequences else "; when they are full the youngest wait"
        return [*lines, f"{holds} tokens{rest}"]

    def _line(self, holder: Holder) -> str:
        part, pages = holder.footprint, f"{self.num_pages} pages of {self.demand.page_size} tokens"
        features = self.tokens * part.feature_bytes
        work = self._bytes(holder) - part.weights_bytes - self.tokens * part.kv_bytes - features
        parts = [
            f"weights {human(part.weights_bytes)}",
            f"cache {human(self.tokens * part.kv_bytes)} ({pages}, {human(part.kv_bytes)} a token)",
            *([f"features {human(features)}"] if features else []),
            f"work about {human(work)}",
        ]
        where = "" if holder.shared else f"; {human(self._bytes(holder))} of its device"
        return f"memory of {holder.name}: {', '.join(parts)}{where}"

    def _bytes(self, holder: Holder) -> int:
        return holder.fixed_bytes(self.demand) + self.tokens * holder.token_bytes


def plan_memory(
    holders: Sequence[Holder], demand: Demand, host_bytes: int | None = None
) -> MemoryPlan:
    """Pages for everybody: as many as are wanted, or as fit here. Raises ConfigError."""
    sharing = [holder for holder in holders if holder.shared]
    fitting = demand.wanted_pages
    if host_bytes is not None and sharing:
        token_bytes = sum(holder.token_bytes for holder in sharing)
        fitting = _fitting_pages(sharing, demand, host_bytes, token_bytes)
        if fitting < demand.sequence_pages:
            raise ConfigError(_too_little(sharing, demand, host_bytes))
    if demand.num_pages > fitting:
        raise ConfigError(
            f"target.num_pages: {demand.num_pages} pages do not fit; set it to {fitting} or less"
        )
    if 0 < demand.num_pages < demand.sequence_pages:
        raise ConfigError(
            f"target.num_pages: {demand.num_pages} pages do not hold one sequence of"
            f" {demand.max_context} tokens; set it to {demand.sequence_pages} or more"
        )
    return MemoryPlan(tuple(holders), demand, min(demand.wanted_pages, fitting), host_bytes)


def human(size_bytes: int) -> str:
    """A size in its largest unit, to three digits."""
    size, units = float(size_bytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.3g} {unit}" if size < 100 else f"{size:.0f} {unit}"


def _fitting_pages(
    sharing: Sequence[Holder], demand: Demand, host_bytes: int, token_bytes: int
) -> int:
    """How many pages the memory here can give everybody, at so many bytes a token for all."""
    left = host_bytes - sum(holder.fixed_bytes(demand) for holder in sharing)
    return max(0, int(CACHE_SHARE * left)) // (token_bytes * demand.page_size)


def _too_little(sharing: Sequence[Holder], demand: Demand, host_bytes: int) -> str:
    """Why not even one sequence fits, and what would."""
    token_bytes = sum(holder.token_bytes for holder in sharing)

    def fits(context: int, each: int = token_bytes) -> bool:
        less = replace(demand, max_context=context)
        return _fitting_pages(sharing, less, host_bytes, each) >= less.sequence_pages

    context = bisect_right(range(demand.max_context), False, key=lambda n: not fits(n)) - 1
    as_int8 = token_bytes + sum(
        holder.footprint.int8_bytes - holder.footprint.kv_bytes
        for holder in sharing
        if holder.target
    )
    remedies = [f"set limits.max_context to {context}"] if context > 1 else []
    if fits(demand.max_context, as_int8):
        remedies.append("set target.kv_dtype to int8")
    if any(holder.footprint.dtype in WIDE for holder in sharing):
        remedies.append("set target.dtype to bf16")
    fixed = sum(holder.fixed_bytes(demand) for holder in sharing)
    return (
        f"limits.max_context: weights and work take {human(fixed)} of {human(host_bytes)} here, and"
        f" of the rest {CACHE_SHARE:.0%} does not hold one sequence of {demand.max_context} tokens"
        f" ({human(token_bytes)} each); {', or '.join(remedies) or 'take a smaller model'}"
    )
