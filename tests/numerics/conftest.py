"""Models for the numerics tests, on one thread: a second one only waits on a busy machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), 1, layers=3)


@pytest.fixture(scope="session")
def small_model(small_model_folder: Path) -> Path:
    return small_model_folder
