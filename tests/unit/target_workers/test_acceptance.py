"""Walks down a tree by the target's own tokens."""

import random

import pytest

from protos.messages import TreeNode
from target_workers.acceptance import depths, is_path, tree_error, walk

CHAIN = tuple(TreeNode(i - 1, token) for i, token in enumerate((5, 6, 7)))
#        root
#       /    \
#      5      6
#     / \      \
#    7   8      7
#    |
#    9
TREE = tuple(TreeNode(*n) for n in ((-1, 5), (-1, 6), (0, 7), (0, 8), (1, 7), (2, 9)))


@pytest.mark.parametrize(
    ("nodes", "chosen", "path", "next_token"),
    [
        ((), (4,), (), 4),
        (CHAIN, (4, 6, 7, 8), (), 4),
        (CHAIN, (5, 1, 7, 8), (0,), 1),
        (CHAIN, (5, 6, 2, 8), (0, 1), 2),
        (CHAIN, (5, 6, 7, 8), (0, 1, 2), 8),
        (TREE, (1, 7, 7, 9, 0, 0, 0), (), 1),
        (TREE, (5, 7, 7, 9, 0, 0, 3), (0, 2, 5), 3),
        (TREE, (5, 8, 7, 9, 2, 0, 3), (0, 3), 2),
        (TREE, (6, 8, 7, 9, 2, 4, 3), (1, 4), 4),
        (TREE, (6, 7, 0, 9, 2, 4, 3), (1,), 0),
    ],
)
def test_a_guess_stands_if_it_is_the_targets_own_token(
    nodes: tuple[TreeNode, ...], chosen: tuple[int, ...], path: tuple[int, ...], next_token: int
) -> None:
    assert walk(nodes, chosen) == (path, next_token)


@pytest.mark.parametrize("seed", range(50))
def test_the_walk_of_any_tree_is_plain_decoding(seed: int) -> None:
    draw = random.Random(seed)
    nodes: list[TreeNode] = []
    for i in range(20):
        node = TreeNode(draw.randrange(-1, i), draw.randrange(3))
        nodes.append(node if node not in nodes else TreeNode(i - 1, draw.randrange(3)))
    after = {-1: draw.randrange(3)} | {i: draw.randrange(3) for i in range(20)}
    path, next_token = walk(nodes, [after[i] for i in range(-1, 20)])
    at = -1
    for i in path:
        assert nodes[i] == TreeNode(at, after[at])
        at = i
    assert next_token == after[at]
    assert TreeNode(at, next_token) not in nodes


@pytest.mark.parametrize(
    ("nodes", "error"),
    [
        ((), ""),
        (CHAIN, ""),
        (TREE, ""),
        ((TreeNode(0, 1),), "parent"),
        ((TreeNode(-2, 1),), "parent"),
        ((TreeNode(-1, 1), TreeNode(2, 1), TreeNode(0, 1)), "parent"),
        ((TreeNode(-1, 1), TreeNode(-1, 1)), "same parent and token"),
    ],
)
def test_what_is_no_tree_is_named(nodes: tuple[TreeNode, ...], error: str) -> None:
    assert error in tree_error(nodes)
    assert bool(error) == bool(tree_error(nodes))


def test_duplicate_siblings_are_never_walked() -> None:
    with pytest.raises(AssertionError, match="same token"):
        walk((TreeNode(-1, 1), TreeNode(-1, 1)), (1, 1, 1))


def test_depth_is_the_distance_from_the_roots_children() -> None:
    assert depths(TREE) == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("path", "fits"),
    [
        ((), True),
        ((0,), True),
        ((0, 2, 5), True),
        ((1, 4), True),
        ((2,), False),
        ((0, 4), False),
        ((0, 0), False),
        ((6,), False),
        ((-1,), False),
    ],
)
def test_a_path_goes_down_from_the_root(path: tuple[int, ...], fits: bool) -> None:
    assert is_path(TREE, path) == fits
