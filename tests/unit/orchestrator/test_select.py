"""Selections are connected, within K, and the best there are."""

import itertools
import random

import pytest

from orchestrator.select import select
from protos.draft_tree import DraftTree, Node


def random_tree(rng: random.Random, size: int) -> DraftTree:
    tree = DraftTree(1)
    nodes: list[Node | None] = [None]
    for _ in range(size):
        node = tree.add(rng.choice(nodes), rng.randrange(4))
        node.scores["drafter"] = -rng.random()
        nodes.append(node)
    return tree


def reach(node: Node | None) -> float:
    return 0.0 if node is None else reach(node.parent) + node.scores["drafter"]


@pytest.mark.parametrize("seed", range(50))
def test_the_tree_selection_has_the_largest_reach_of_all_connected_sets(seed: int) -> None:
    tree = random_tree(random.Random(seed), 7)
    nodes = list(tree.walk())
    k = 3
    chosen = select(tree, k, "tree")
    best = sorted((reach(n) for n in nodes), reverse=True)[:k]
    assert sorted((reach(n) for n in chosen), reverse=True) == pytest.approx(best)
    for i, node in enumerate(chosen):
        assert node.parent is None or node.parent in chosen[:i]


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_follows_the_best_child(seed: int) -> None:
    chain = select(random_tree(random.Random(seed), 12), 4, "chain")
    for parent, child in itertools.pairwise((None, *chain)):
        assert child.parent is parent
        siblings = (parent.children if parent else chain[0].parent or {}) or {}
        assert all(reach(child) >= reach(s) for s in dict(siblings).values())


def test_ties_go_to_the_lowest_token() -> None:
    tree = DraftTree(1)
    for token in (5, 3, 4):
        tree.add(None, token).scores["drafter"] = -1.0
    assert [n.token for n in select(tree, 1, "chain")] == [3]
    assert [n.token for n in select(tree, 2, "tree")] == [3, 4]


def test_no_guess_is_selected_at_k_zero() -> None:
    assert select(random_tree(random.Random(1), 5), 0, "chain") == ()
