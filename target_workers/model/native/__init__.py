"""The decoder as compiled CPU kernels, written in Numba and, where it lacks words, in LLVM.

Compiling takes tens of seconds. What was compiled is kept in the user's cache
folder, under a hash of these sources: Numba itself would not notice a change in an imported file.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
from filelock import FileLock, Timeout

from target_workers.model.kernel_cache import kept_in, private_folder, why_not_kept

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


def forget_kernels() -> None:
    """Take away what is kept: a full disk or a loss of power may have cut it short."""
    for file in Path(numba.config.CACHE_DIR).rglob("*.nb[ic]"):
        file.unlink(missing_ok=True)


def _cache_folder() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    folder = kept_in() / digest.hexdigest()[:16]
    if cause := why_not_kept(folder):
        log.warning("kernels are compiled anew at every start: %s", cause)
        return private_folder()
    return folder


numba.config.CACHE_DIR = str(_cache_folder())
