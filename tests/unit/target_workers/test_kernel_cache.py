"""Compiled kernels are kept where they can be, and a start never fails for want of a place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_tiny

ROOT = Path(__file__).parents[3]
ASK = "import numba, target_workers.model.native as n; print(numba.config.CACHE_DIR)"


def asked(cache: Path) -> subprocess.CompletedProcess[str]:
    """Where a process with this cache folder keeps its kernels."""
    return subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )


def test_kernels_are_kept_in_the_users_cache_by_their_sources(tmp_path: Path) -> None:
    first, second = asked(tmp_path), asked(tmp_path)
    folder = Path(first.stdout.strip())
    assert folder.parent == tmp_path / "paceline" / "kernels" and folder.is_dir()
    assert second.stdout == first.stdout


def test_without_a_place_to_keep_them_they_are_compiled_anew(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder can be made below a file")
    done = asked(tmp_path / "file")
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("paceline-kernels-") and not folder.exists()
    assert "compiled anew at every start" in done.stderr


def test_a_folder_of_a_process_that_was_killed_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder can be made below a file")
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    left, own = tmp_path / f"paceline-kernels-{gone}-x", f"paceline-kernels-{os.getpid()}-x"
    left.mkdir()
    (tmp_path / own).mkdir()
    subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    assert [path.name for path in tmp_path.glob("paceline-kernels-*")] == [own]


COMPILE = """
import sys, torch
from pathlib import Path
from target_workers.model.loading import load_decoder
decoder = load_decoder(Path(sys.argv[1]), dtype=torch.float32)
decoder.compile(torch.float32)
"""


@pytest.mark.long
def test_kernels_that_were_cut_short_are_compiled_anew(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", 4, "Llama", num_hidden_layers=1)

    def compiled() -> str:
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, str(folder)],
            cwd=ROOT,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr

    assert not compiled()
    kept = [*tmp_path.rglob("*.nb[ic]")]
    assert kept
    for file in kept:
        file.write_bytes(file.read_bytes()[:100])
    assert "compiling them anew" in compiled()
    assert not compiled()
