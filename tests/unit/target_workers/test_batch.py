"""Runs laid out as rows, and draft trees cut into runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_workers.model.batch import IntArray, Run, build_batch, tree_runs


def run_of(tokens: list[int], start: int, first_slot: int) -> Run:
    slots = np.arange(first_slot, first_slot + start + len(tokens))
    return Run(np.array(tokens), start, slots[start:], slots[:start])


def test_rows_come_in_run_order() -> None:
    batch = build_batch([run_of([7, 8], 3, 0), run_of([9], 0, 100)])
    assert batch.tokens.tolist() == [7, 8, 9]
    assert batch.positions.tolist() == [3, 4, 0]
    assert batch.slots.tolist() == [3, 4, 100]
    assert batch.num_rows == 3


def test_padding_repeats_the_last_row() -> None:
    batch = build_batch([run_of([7, 8, 9], 2, 0)])
    assert batch.padded(3) is batch and batch.padded(2) is batch
    padded = batch.padded(8)
    assert padded.tokens.tolist() == [7, 8, 9, 9, 9, 9, 9, 9]
    assert padded.positions.tolist() == [2, 3, 4, 4, 4, 4, 4, 4]
    assert padded.slots.tolist() == [2, 3, 4, 4, 4, 4, 4, 4]
    assert padded.num_rows == 3


def test_a_run_that_lacks_history_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="history"):
        build_batch([Run(np.array([1]), 2, np.array([5]), np.array([4]))])


def test_a_chain_goes_on_from_the_trunk() -> None:
    runs, rows = tree_runs(run_of([1, 2], 3, 0), np.array([5, 6]), [-1, 0], np.array([50, 51]))
    assert len(runs) == 1
    assert runs[0].tokens.tolist() == [1, 2, 5, 6]
    assert runs[0].slots.tolist() == [3, 4, 50, 51]
    assert rows.tolist() == [2, 3]


def test_no_nodes_leave_the_trunk_as_it_is() -> None:
    empty = np.array([], dtype=np.int64)
    runs, rows = tree_runs(run_of([1], 3, 0), empty, [], empty)
    assert [run.tokens.tolist() for run in runs] == [[1]]
    assert rows.tolist() == []


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 3), st.integers(0, 4))
def test_every_node_sees_exactly_its_ancestors(
    choices: list[int], trunk_rows: int, start: int
) -> None:
    parents = [choice % (node + 1) - 1 for node, choice in enumerate(choices)]
    count = len(parents)
    trunk = run_of(list(range(900, 900 + trunk_rows)), start, 0)
    tokens: IntArray = np.arange(100, 100 + count)
    slots: IntArray = np.arange(500, 500 + count)
    runs, rows = tree_runs(trunk, tokens, parents, slots)
    batch = build_batch(runs)
    assert batch.num_rows == trunk_rows + count
    seen_by_row = [
        [*run.history, *run.slots[: index + 1]] for run in runs for index in range(len(run.tokens))
    ]
    for node, row in enumerate(rows):
        path, above = [], node
        while above >= 0:
            path.append(500 + above)
            above = parents[above]
        assert seen_by_row[row] == [*trunk.history, *trunk.slots, *path[::-1]]
        assert batch.tokens[row] == tokens[node]
        assert batch.positions[row] == start + trunk_rows + len(path) - 1
