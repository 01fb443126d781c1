"""Where compiled kernels are kept: in the user's cache folder, else in one that goes with us."""

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

PRIVATE = "paceline-kernels-"


def kept_in() -> Path:
    """The user's folder for kernels of every kind."""
    return user_cache_path("paceline") / "kernels"


def why_not_kept(folder: Path) -> str:
    """Make a folder; why nothing can be kept in it, empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return str(error)


def private_folder() -> Path:
    """A new folder of this process alone, since what is in it is run; it goes with the process.

    A process that is killed leaves its folder behind: the next one takes it away.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PRIVATE}*"):
        if not _is_in_use(left):
            shutil.rmtree(left, ignore_errors=True)
    own = tempfile.mkdtemp(prefix=f"{PRIVATE}{os.getpid()}-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def _is_in_use(folder: Path) -> bool:
    """False if the process that made it is gone."""
    made_by = re.match(rf"{PRIVATE}(\d+)-", folder.name)
    if made_by is None:
        return True
    try:
        os.kill(int(made_by[1]), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # It is another user's.
    return True
