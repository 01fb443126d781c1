"""The decoder as compiled CPU kernels, written in Numba and, where it lacks words, in LLVM.

Compiling takes tens of seconds once per machine. What was compiled is kept in the user's cache
folder, under a hash of these sources: Numba itself would not notice a change in an imported file.
"""

import atexit
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
from filelock import FileLock, Timeout
from platformdirs import user_cache_path

log = logging.getLogger(__name__)

# Twice what compiling all kernels takes on a busy machine.
LOCK_TIMEOUT_S = 90.0


@contextmanager
def compiling(timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """The right to keep kernels: two processes that keep them at once may take each other's.

    A process stopped while it compiles must not stop all others: after the timeout this one goes
    on without the right. Only two that write in the same instant can harm each other.
    """
    lock = FileLock(Path(numba.config.CACHE_DIR) / "lock", timeout=timeout_s)
    try:
        lock.acquire()
    except Timeout:
        log.warning("the kernels' lock was not free within %.0f s; going on without it", timeout_s)
    try:
        yield
    finally:
        lock.release()


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
