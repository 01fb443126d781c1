"""A checkpoint is whole or the one before, and of one module."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from drafter_workers.training.checkpoints import FILE, kept_step, restore, store
from drafter_workers.training.errors import TrainingError


def made(size: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module that has taken a step, and its optimiser; one tensor of it is not trained."""
    torch.manual_seed(size)
    module = nn.Sequential(nn.Linear(size, size), nn.Linear(size, 1))
    module[0].bias.requires_grad_(False)
    optimiser = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    module(torch.ones(1, size)).sum().backward()
    optimiser.step()
    return module, optimiser


def test_what_is_trained_and_the_optimiser_come_back(tmp_path: Path) -> None:
    module, optimiser = made()
    store(tmp_path, module, optimiser, 7)
    other, its = made()
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    assert restore(tmp_path, other, its) == kept_step(tmp_path) == 7
    for name, each in other.named_parameters():
        if each.requires_grad:
            assert torch.equal(each, module.get_parameter(name)), name
        else:
            assert not bool(each.any()), "what is not trained is not kept"
    states = (each.state_dict()["state"] for each in (optimiser, its))
    for mine, theirs in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_nothing_is_there_at_first(tmp_path: Path) -> None:
    assert restore(tmp_path, *made()) == kept_step(tmp_path) == 0


def test_a_kill_while_writing_leaves_the_last_one(tmp_path: Path) -> None:
    store(tmp_path, *made(), 1)
    (tmp_path / f"{FILE}.part").write_bytes(b"half of")
    assert restore(tmp_path, *made()) == 1
    store(tmp_path, *made(), 2)
    assert restore(tmp_path, *made()) == 2


@contextmanager
def small_files() -> Iterator[None]:
    """No file can grow beyond some kilobytes meanwhile, as on a disk that is full.

    Not longer than a call: the test runner's own output may be a file too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_last_one_and_says_so(tmp_path: Path) -> None:
    store(tmp_path, *made(), 1)
    larger = made(200)
    refused = pytest.raises(TrainingError, match=r"cannot keep step 2 .*too large.*make room")
    with small_files(), refused:
        store(tmp_path, *larger, 2)
    assert kept_step(tmp_path) == 1 and [path.name for path in tmp_path.iterdir()] == [FILE]


def test_another_module_is_refused(tmp_path: Path) -> None:
    store(tmp_path, *made(4), 1)
    with pytest.raises(TrainingError, match="of another student"):
        restore(tmp_path, *made(5))


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 cut short"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    for read in (lambda: restore(tmp_path, *made()), lambda: kept_step(tmp_path)):
        with pytest.raises(TrainingError, match=rf"{FILE} cannot be read .*delete it"):
            read()


@pytest.mark.parametrize("content", [[1], {"step": 1}])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / FILE)
    for read in (lambda: restore(tmp_path, *made()), lambda: kept_step(tmp_path)):
        with pytest.raises(TrainingError, match=rf"{FILE} cannot be read .*delete it"):
            read()


def test_an_optimiser_of_something_else_is_named(tmp_path: Path) -> None:
    store(tmp_path, *made(), 1)
    state = torch.load(tmp_path / FILE, weights_only=True)
    torch.save(state | {"optimiser": {"state": {}}}, tmp_path / FILE)
    with pytest.raises(TrainingError, match=rf"{FILE} cannot be read .*delete it"):
        restore(tmp_path, *made())
