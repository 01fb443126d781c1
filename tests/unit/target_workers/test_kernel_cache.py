"""Compiled kernels are kept where they can be, and a start never fails for want of a place."""

import os
import subprocess
import sys
from pathlib import Path

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
