"""Runs laid out as rows."""

import numpy as np
import pytest

from target_workers.model.batch import build_batch
from target_workers.model.run import Run


def run_of(tokens: list[int], start: int, first_slot: int) -> Run:
    slots = np.arange(first_slot, first_slot + start + len(tokens))
    return Run(np.array(tokens), start, slots[start:], slots[:start])


def test_rows_come_in_run_order() -> None:
    batch = build_batch([run_of([7, 8], 3, 0), run_of([9], 0, 100)])
    assert batch.tokens.tolist() == [7, 8, 9]
    assert batch.positions.tolist() == [3, 4, 0]
    assert batch.slots.tolist() == [3, 4, 100]


def test_a_run_that_lacks_history_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="history"):
        build_batch([Run(np.array([1]), 2, np.array([5]), np.array([4]))])
