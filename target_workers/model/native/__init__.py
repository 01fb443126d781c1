"""The decoder as compiled CPU kernels, written in Numba and, where it lacks words, in LLVM.

Compiling takes tens of seconds once per machine. What was compiled is kept in the user's cache
folder, under a hash of these sources: Numba itself would not notice a change in an imported file.
"""

import atexit
import hashlib
import logging
import shutil
import tempfile
from pathlib import Path

import numba
from platformdirs import user_cache_path

log = logging.getLogger(__name__)


def _cache_folder() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    folder = user_cache_path("paceline") / "kernels" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        log.warning("kernels are compiled anew at every start: %s", error)
        # Of our own and gone with us: what is in such a folder is run.
        own = tempfile.mkdtemp(prefix="paceline-kernels-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return Path(own)


numba.config.CACHE_DIR = str(_cache_folder())
