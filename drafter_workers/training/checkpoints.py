"""Where a run stands, on disk: written beside and moved into place, so that it is whole or old."""

import os
from pathlib import Path

import torch
from torch import nn

FILE = "checkpoint.pt"


def store(folder: Path, module: nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Keep the trained parameters, the optimiser and the step. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "trained": {name: each for name, each in module.named_parameters() if each.requires_grad},
        "optimiser": optimiser.state_dict(),
    }
    unfinished = folder / f"{FILE}.part"
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / FILE)


def restore(folder: Path, module: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Take up what `store` kept; the step, 0 if nothing is there.

    Raises ValueError for a checkpoint of another module.
    """
    path = folder / FILE
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    known = {name: tuple(each.shape) for name, each in state["trained"].items()}
    if known != {name: tuple(each.shape) for name, each in trained.items()}:
        raise ValueError(
            f"{path} is of another student; give another folder, or the options it was started with"
        )
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(state["trained"][name])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])
