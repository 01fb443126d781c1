"""What tests of every kind share."""

from pathlib import Path

import pytest

from services.pull import PullError, resolve


@pytest.fixture(scope="session")
def small_model_folder() -> Path:
    """The pulled small model, wherever the cache is; without it the test is skipped."""
    try:
        return resolve("smollm2-135m")
    except PullError as missing:
        pytest.skip(str(missing))
