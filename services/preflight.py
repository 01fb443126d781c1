"""What is refused before anything is started: features, models, tokenizers, addresses, memory."""

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from services.config import Config, ServerConfig, SpeculationConfig
from services.errors import ConfigError, PacelineError, TokenizerError
from services.pull import PullError, resolve
from services.tokenizer import Tokenizer, load_tokenizer

REACH_S = 5.0
# Of NVIDIA's driver, before and after its first use; of WSL's; of AMD's.
GPU_SIGNS = tuple(
    map(Path, ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
)
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


class LaunchError(PacelineError):
    """What could not be started although nothing spoke against it, and why."""


@dataclass(frozen=True, slots=True)
class Models:
    """The folders of the target and of each [[drafter]], and the tokenizer they share."""

    target: Path
    drafters: tuple[Path, ...]
    tokenizer: Tokenizer


def check(config: Config, methods: tuple[str, ...]) -> Models:
    """Everything that can be told without a model's code. Raises ConfigError."""
    _check_supported(config, methods)
    _check_addresses(config.server)
    _check_cluster(config.cluster.address)
    target = _folder("model.path", config.model.path)
    tokenizer = _tokenizer("model.path", target)
    _check_weights("model.path", target)
    if "drafter" not in config.speculation.sources:
        return Models(target, (), tokenizer)
    folders = []
    for index, drafter in enumerate(config.drafter):
        key = f"drafter.{index}.path"
        folders.append(_folder(key, drafter.path))
        if not _borrows(folders[-1]):
            _check_same(key, tokenizer, _tokenizer(key, folders[-1]))
        _check_weights(key, folders[-1])
    return Models(target, tuple(folders), tokenizer)


def _borrows(folder: Path) -> bool:
    """True for a student of the target's own embedding: it has no tokenizer of its own."""
    try:
        return "borrows_from" in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False  # said of it where its shape is read


def memory_bytes() -> int:
    """The memory this machine, or the container it is, lets a process have."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP_MEMORY.read_text().strip() if CGROUP_MEMORY.is_file() else "max"
    return min(physical, int(limit)) if limit.isdigit() else physical


def _check_supported(config: Config, methods: tuple[str, ...]) -> None:
    if config.target.device == "cuda" and config.target.is_exact:
        raise ConfigError("target.exact: exact mode is for CPUs so far; set it to false on cuda")
    _check_later(config)
    _check_devices(config)
    for index, drafter in enumerate(config.drafter):
        if drafter.method not in ("auto", *methods):
            known = ", ".join(methods)
            raise ConfigError(f"drafter.{index}.method is {drafter.method!r}; known are {known}")


def _check_devices(config: Config) -> None:
    """Raises ConfigError for a GPU that this machine has not, by what its driver leaves."""
    if config.cluster.address or any(path.exists() for path in GPU_SIGNS):
        return
    devices = [("target.device", config.target.device)]
    if "drafter" in config.speculation.sources:
        devices += [(f"drafter.{i}.device", each.device) for i, each in enumerate(config.drafter)]
    for key, device in devices:
        if device == "cuda":
            raise ConfigError(
                f"{key} is cuda, and this machine has no GPU or no driver for it; set it to cpu"
            )


def _check_later(config: Config) -> None:
    """Raises ConfigError for a value that was set and would do nothing yet."""
    ours, speculation, server = SpeculationConfig(), config.speculation, ServerConfig()
    asked = {
        "speculation.allow_lossy": speculation.allow_lossy,
        "speculation.sources: suffix": speculation.sources != ours.sources
        and "suffix" in speculation.sources,
        "server.http": config.server.http not in ("", server.http),
        "server.metrics": config.server.metrics not in ("", server.metrics),
    }
    for key, is_set in asked.items():
        if is_set:
            raise ConfigError(f"{key} comes with a later release; leave it out")


def _check_weights(key: str, folder: Path) -> None:
    """Raises ConfigError for weights that are missing or cut short, by their headers alone."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        for name in names:
            with safe_open(folder / name, framework="numpy"):
                pass
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: {folder} lacks {name}; fetch the model again") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        broken = f"{key}: the weights in {folder} are cut short or no safetensors files"
        raise ConfigError(f"{broken} ({error}); fetch the model again") from error


def _check_addresses(server: ServerConfig) -> None:
    """Raises ConfigError for an address that another process has or that is not ours."""
    for key, address in (("grpc", server.grpc), ("health", server.health)):
        host, _, port = address.rpartition(":")
        if not address or port == "0":
            continue
        try:
            family, kind, *_, where = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            raise ConfigError(
                f"server.{key}: cannot listen on {address} ({error.strerror}); "
                "stop what runs there or choose another address"
            ) from error


def _check_cluster(address: str) -> None:
    """Ray itself would try for minutes to reach a cluster that is not there."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.address: nothing answers at {address} ({error.strerror or error}); "
            "start Ray there, or leave it empty to start Ray here"
        ) from error


def _folder(key: str, path: str) -> Path:
    try:
        return resolve(path)
    except PullError as error:
        raise ConfigError(f"{key}: {error}") from error


def _tokenizer(key: str, folder: Path) -> Tokenizer:
    try:
        return load_tokenizer(folder)
    except TokenizerError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_same(key: str, target: Tokenizer, drafter: Tokenizer) -> None:
    difference = target.first_difference(drafter)
    if difference is not None:
        raise ConfigError(
            f"{key}: its tokenizer is not the target's ({difference}); "
            "take a drafter that was made for this target"
        )
