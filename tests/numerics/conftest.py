"""Models for the numerics tests, on one thread: a second one only waits on a busy machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny_llama

SMALL_MODEL = Path.home() / ".cache/paceline/models/smollm2-135m"


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
def small_model() -> Path:
    if not (SMALL_MODEL / "config.json").is_file():
        pytest.skip("the small model is not here: paceline pull smollm2-135m")
    return SMALL_MODEL
