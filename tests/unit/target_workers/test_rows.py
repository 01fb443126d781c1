"""Extends laid out as runs: every row sees exactly the rows of its own path."""

import random

import numpy as np
import pytest

from protos.messages import Extend, TreeNode
from protos.sampling import GREEDY, Sampling
from target_workers.model.chooser import Chooser
from target_workers.rows import Layout, chains

PLAIN = Chooser(GREEDY)
SLOTS = np.arange(100, 140, dtype=np.int64)


def tree(*nodes: tuple[int, int]) -> tuple[TreeNode, ...]:
    return tuple(TreeNode(*node) for node in nodes)


def test_a_chain_is_one_run_with_its_tokens() -> None:
    layout = Layout()
    layout.add(Extend(1, 3, (7, 8), tree((-1, 5), (0, 6))), SLOTS, PLAIN)
    (run,) = layout.runs
    assert run.tokens.tolist() == [7, 8, 5, 6]
    assert run.slots.tolist() == [103, 104, 105, 106]
    assert run.history.tolist() == [100, 101, 102]
    (block,) = layout.draws.blocks
    assert (list(block.draws), block.end) == ([0, 1, 2], 5)
    assert layout.draws.rows == [1, 2, 3]
    assert layout.draws.positions == [5, 6, 7]


def test_a_side_branch_sees_its_ancestors_and_no_other_branch() -> None:
    layout = Layout()
    nodes = tree((-1, 5), (-1, 6), (0, 7), (1, 8), (0, 9))
    layout.add(Extend(1, 2, (4,), nodes), SLOTS, PLAIN)
    trunk, second, third = layout.runs
    assert (trunk.tokens.tolist(), trunk.slots.tolist()) == ([4, 5, 7], [102, 103, 105])
    assert (second.tokens.tolist(), second.start) == ([6, 8], 3)
    assert second.slots.tolist() == [104, 106]
    assert second.history.tolist() == [100, 101, 102]
    assert (third.tokens.tolist(), third.start, third.slots.tolist()) == ([9], 4, [107])
    assert third.history.tolist() == [100, 101, 102, 103]
    assert layout.draws.rows == [0, 1, 3, 2, 4, 5]
    assert layout.draws.positions == [3, 4, 4, 5, 5, 5]


def test_a_prefill_chunk_decides_nothing() -> None:
    layout = Layout()
    layout.add(Extend(1, 0, (1, 2, 3)), SLOTS, None)
    assert layout.num_rows == 3
    assert (layout.draws.rows, layout.draws.blocks) == ([], [])


def test_a_prompt_is_scored_after_the_rows_of_its_extend() -> None:
    layout = Layout()
    layout.add(Extend(1, 0, (1, 2, 3)), SLOTS, None)
    layout.score((5, 6), 2)
    layout.add(Extend(2, 4, (4, 5)), SLOTS, None)
    (prompt,) = layout.draws.prompts
    assert (prompt.rows, prompt.tokens, prompt.best) == (slice(3, 5), (5, 6), 2)
    assert [(piece.rows, piece.tokens) for piece in prompt.pieces(1)] == [
        (slice(3, 4), (5,)),
        (slice(4, 5), (6,)),
    ]


def test_extends_follow_each_other_with_their_own_choosers() -> None:
    layout = Layout()
    seeded = Chooser(Sampling(0.5, 7))
    layout.add(Extend(1, 0, (1, 2, 3)), SLOTS, None)
    layout.add(Extend(2, 0, (1, 2), tree((-1, 5))), SLOTS, seeded)
    layout.add(Extend(3, 4, (9,)), SLOTS, PLAIN)
    first, second = layout.draws.blocks
    assert (list(first.draws), list(second.draws)) == ([0, 1], [2])
    assert layout.draws.rows == [4, 5, 6]
    assert (first.chooser, second.chooser) == (seeded, PLAIN)


@pytest.mark.parametrize("seed", range(30))
def test_every_node_of_any_tree_sees_its_path(seed: int) -> None:
    draw = random.Random(seed)
    nodes = tree(*((draw.randrange(-1, i), i) for i in range(15)))
    layout = Layout()
    layout.add(Extend(1, 5, (50, 51), nodes), SLOTS, PLAIN)
    seen: dict[int, list[int]] = {}
    for run in layout.runs:
        path = run.history.tolist()
        assert len(path) == run.start
        for slot in run.slots.tolist():
            path.append(slot)
            seen[len(seen)] = list(path)
    for i, row in enumerate(layout.draws.rows[1:]):
        above: list[int] = []
        at = i
        while at >= 0:
            above.append(107 + at)
            at = nodes[at].parent
        assert seen[row] == [*range(100, 107), *reversed(above)]
        assert layout.draws.positions[1 + i] == len(seen[row])


def test_chains_cover_every_node_once() -> None:
    nodes = tree((-1, 1), (0, 2), (0, 3), (1, 4), (-1, 5))
    assert chains(nodes) == [[0, 1, 3], [2], [4]]
    assert chains(()) == [[]]
