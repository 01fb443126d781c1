"""The decoder as compiled CPU kernels, written in Numba and, where it lacks words, in LLVM.

Compiling takes tens of seconds once per machine. What was compiled is kept in the user's cache
folder, under a hash of these sources: Numba itself would not notice a change in an imported file.
"""

import hashlib
from pathlib import Path

import numba
from platformdirs import user_cache_path


def _cache_folder() -> Path:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return user_cache_path("paceline") / "kernels" / digest.hexdigest()[:16]


numba.config.CACHE_DIR = str(_cache_folder())
