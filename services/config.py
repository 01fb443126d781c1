"""The configuration: one TOML file as nested frozen values that check themselves.

Every key has a default and an unknown key is an error. Nothing here is changed after loading.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.errors import ConfigError
from services.tables import Table, build, override, require

AUTO_K = 4
MAX_K = 64
LEAST_RANK_TIMEOUT_S = 0.1

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The served model: a folder, GGUF file or hub name, and the name clients ask for."""

    path: str = "smollm2-135m"
    name: str = ""

    def __post_init__(self) -> None:
        require(self.path != "", "model.path", "is empty; give a folder or a hub name")

    @property
    def served_name(self) -> str:
        return self.name or Path(self.path).name


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Where and how the target runs. Empty `cores`: all of this process's.

    `kv_dtype` is what keys and values are kept as (empty: as `dtype`), in `num_pages` pages of
    `page_size` tokens (0: enough for all sequences, or what fits); `weight_dtype` what matrices
    are kept as, which with int8 is a smaller and another model.
    """

    device: Device = "cpu"
    tp: int = 1
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    kv_dtype: Literal["", "fp32", "bf16", "int8"] = ""
    weight_dtype: Literal["", "int8"] = ""
    exact: bool | None = None
    page_size: int = 16
    num_pages: int = 0
    cores: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _at_least(1, self.tp, "target.tp")
        _at_least(1, self.page_size, "target.page_size")
        _at_least(0, self.num_pages, "target.num_pages")
        _check_cores(self.cores, "target.cores")

    @property
    def is_exact(self) -> bool:
        """Exact mode costs next to nothing on a CPU and much elsewhere."""
        return self.device == "cpu" if self.exact is None else self.exact


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """One drafter and its replicas. `rank` says what children are ranked by.

    Its matrices are kept as `weight_dtype` (empty: as the target's type).
    """

    method: str = "auto"
    path: str = ""
    device: Device = "cpu"
    replicas: int = 1
    required: bool = False
    rank: Literal["noise", "argmax"] = "noise"
    weight_dtype: Literal["", "int8"] = ""
    cores: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(self.method != "", "drafter.method", 'is empty; "auto" recognises it')
        _at_least(1, self.replicas, "drafter.replicas")
        _check_cores(self.cores, "drafter.cores")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What requests that leave the choice to the server get.

    `patience_s` bounds the target's wait for a first draft, `sync_patience_s` its wait for a block
    in mode sync; `credit` the live nodes a drafter holds per sequence.
    """

    mode: Literal["off", "sync", "async"] = "async"
    k: int | Literal["auto"] = "auto"
    shape: Literal["auto", "chain", "tree"] = "auto"
    sources: tuple[Literal["drafter", "lookup", "suffix"], ...] = ("drafter", "lookup", "suffix")
    allow_lossy: bool = False
    patience_s: float = 0.01
    sync_patience_s: float = 1.0
    credit: int = 32

    def __post_init__(self) -> None:
        require(1 <= self.fixed_k <= MAX_K, "speculation.k", f'must be "auto" or 1 to {MAX_K}')
        _not_negative(self.patience_s, "speculation.patience_s")
        _not_negative(self.sync_patience_s, "speculation.sync_patience_s")
        _at_least(1, self.credit, "speculation.credit")

    @property
    def fixed_k(self) -> int:
        return AUTO_K if self.k == "auto" else self.k


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Bounds on what runs at once, on one request, and on one step's rows."""

    max_sequences: int = 8
    max_queue: int = 64
    max_context: int = 8192
    max_request_s: float = 600.0
    step_rows: int = 256

    def __post_init__(self) -> None:
        _at_least(1, self.max_sequences, "limits.max_sequences")
        _at_least(0, self.max_queue, "limits.max_queue")
        _at_least(2, self.max_context, "limits.max_context")
        _positive(self.max_request_s, "limits.max_request_s")
        enough = self.step_rows >= self.max_sequences
        require(enough, "limits.step_rows", "must be at least limits.max_sequences")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Addresses and bounds of the edge. An empty `http`, `metrics` or `health` is not opened.

    A client may ping once per `min_ping_s`; a reader that takes nothing for `slow_reader_s` loses
    its stream; running streams get `drain_s` to end when the server stops.
    """

    grpc: str = "127.0.0.1:50051"
    http: str = "127.0.0.1:8000"
    metrics: str = "127.0.0.1:9400"
    health: str = "127.0.0.1:50052"
    reflection: bool = True
    max_message_bytes: int = 16 * 1024 * 1024
    max_streams: int = 1024
    min_ping_s: float = 5.0
    keepalive_s: float = 20.0
    keepalive_timeout_s: float = 5.0
    slow_reader_s: float = 30.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        require(self.grpc != "", "server.grpc", "is empty; clients need an address")
        taken: set[str] = set()
        for key, address in self._addresses():
            _check_address(address, key)
            require(address not in taken, key, f"is {address!r}, as another server address is")
            if address and not address.endswith(":0"):
                taken.add(address)
        for key, seconds in self._durations():
            _positive(seconds, key)
        _at_least(65536, self.max_message_bytes, "server.max_message_bytes")
        _at_least(1, self.max_streams, "server.max_streams")

    def _addresses(self) -> Iterable[tuple[str, str]]:
        yield "server.grpc", self.grpc
        yield "server.http", self.http
        yield "server.metrics", self.metrics
        yield "server.health", self.health

    def _durations(self) -> Iterable[tuple[str, float]]:
        yield "server.min_ping_s", self.min_ping_s
        yield "server.keepalive_s", self.keepalive_s
        yield "server.keepalive_timeout_s", self.keepalive_timeout_s
        yield "server.slow_reader_s", self.slow_reader_s
        yield "server.drain_s", self.drain_s


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Where Ray is (empty: started here), and how long its workers may be silent.

    Sequences wait `recovery_s` for a lost target (none given: as long as a start may take). `inbox`
    and `outbox` bound the messages that wait at either end of a link; a full one ends it.
    """

    address: str = ""
    start_timeout_s: float = 120.0
    rank_timeout_s: float = 5.0
    recovery_s: float | None = None
    inbox: int = 4096
    outbox: int = 4096

    def __post_init__(self) -> None:
        _positive(self.start_timeout_s, "cluster.start_timeout_s")
        enough = LEAST_RANK_TIMEOUT_S <= self.rank_timeout_s < math.inf
        require(
            enough,
            "cluster.rank_timeout_s",
            f"must be at least {LEAST_RANK_TIMEOUT_S} s, is {self.rank_timeout_s}: a step takes "
            "longer than that",
        )
        _positive(self.waits_s, "cluster.recovery_s")
        _at_least(1, self.inbox, "cluster.inbox")
        _at_least(1, self.outbox, "cluster.outbox")

    @property
    def waits_s(self) -> float:
        return self.start_timeout_s if self.recovery_s is None else self.recovery_s


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `paceline serve` can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: tuple[DrafterConfig, ...] = ()
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        fits = self.speculation.fixed_k < self.limits.step_rows
        require(fits, "speculation.k", "must be less than limits.step_rows")


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` (None: the defaults) with `a.b=c` overrides on top.

    Raises ConfigError naming the key and the remedy.
    """
    table: Table = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not a TOML file: {error}") from error
    for assignment in overrides:
        override(table, assignment)
    return build(Config, table)


def _at_least(least: int, value: int, key: str) -> None:
    require(value >= least, key, f"must be at least {least}, is {value}")


def _positive(value: float, key: str) -> None:
    require(0 < value < math.inf, key, f"must be positive and finite, is {value}")


def _not_negative(value: float, key: str) -> None:
    require(0 <= value < math.inf, key, f"must be finite and not negative, is {value}")


def _check_cores(cores: tuple[int, ...], key: str) -> None:
    require(all(core >= 0 for core in cores), key, "must not be negative")
    require(len(set(cores)) == len(cores), key, "names a core twice")


def _check_address(address: str, key: str) -> None:
    host_and_port = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):([0-9]{1,5})", address)
    fits = address == "" or (host_and_port is not None and int(host_and_port[2]) <= 65535)
    require(fits, key, f"must be host:port, is {address!r}")
