"""Where a run stands, on disk: written beside and moved into place, so that it is whole or old."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drafter_workers.training.errors import TrainingError

FILE = "checkpoint.pt"
KEYS = {"step", "trained", "optimiser"}
# What torch says of a file that is cut short or something else.
UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError)


def store(folder: Path, module: nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Keep the trained parameters, the optimiser and the step.

    Raises TrainingError if it cannot be written; what was kept before then stays.
    """
    state = {
        "step": step,
        "trained": {name: each for name, each in module.named_parameters() if each.requires_grad},
        "optimiser": optimiser.state_dict(),
    }
    unfinished = folder / f"{FILE}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / FILE)
    except (OSError, RuntimeError) as error:  # torch's writer turns one into the other
        unfinished.unlink(missing_ok=True)
        raise TrainingError(
            f"cannot keep step {step} in {folder} ({_cause(error)}); make room and run the same "
            "command again: it goes on from the last checkpoint"
        ) from error


def _cause(error: BaseException) -> str:
    """What the system said, or else the first line of what torch made of it."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return str(error).split("\n")[0]


def kept_step(folder: Path) -> int:
    """The step of a folder's checkpoint, 0 if there is none. Raises TrainingError."""
    return int(_load(folder / FILE, mapped=True)["step"]) if (folder / FILE).is_file() else 0


def restore(folder: Path, module: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Take up what `store` kept; the step, 0 if nothing is there.

    Raises TrainingError for a checkpoint of another module, or one that cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return 0
    state = _load(path)
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    known = {name: tuple(each.shape) for name, each in state["trained"].items()}
    if known != {name: tuple(each.shape) for name, each in trained.items()}:
        raise TrainingError(
            f"{path} is of another student; give another folder, or the options it was started with"
        )
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(state["trained"][name])
    try:
        optimiser.load_state_dict(state["optimiser"])
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    return int(state["step"])


def _load(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """The whole, or mapped: then only what is looked at is read. Raises TrainingError."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, mmap=mapped)
        if not isinstance(state, dict) or state.keys() != KEYS:
            raise ValueError("it is something else")
        return state
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> TrainingError:
    cause = str(error).split("\n")[0].split(". ")[0]
    return TrainingError(
        f"{path} cannot be read ({type(error).__name__}: {cause}); delete it to start anew"
    )
