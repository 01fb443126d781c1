"""The walking rule against a model that remembers the whole path of every id."""

import random

import pytest

from protos.draft_tree import DraftTree, Ids, State
from protos.messages import Guess


class PathModel:
    """Every id as the absolute token sequence it stands for; nothing is ever forgotten."""

    def __init__(self) -> None:
        self.paths: dict[int, tuple[int, ...]] = {}

    def take(self, committed: list[int], frontier: int, guess: Guess) -> None:
        below = self.paths.get(guess.parent)
        parent = tuple(committed[:frontier]) if guess.parent == 0 else below
        if parent is not None:
            self.paths[guess.id] = (*parent, guess.token)

    def live(self, committed: list[int]) -> set[tuple[int, ...]]:
        whole, n = tuple(committed), len(committed)
        return {p for p in self.paths.values() if len(p) > n and p[:n] == whole}


def paths_of(tree: DraftTree, committed: list[int]) -> set[tuple[int, ...]]:
    paths = set()
    for node in tree.walk():
        tail = []
        while node is not None:
            tail.append(node.token)
            node = node.parent
        paths.add((*committed, *reversed(tail)))
    return paths


@pytest.mark.parametrize("seed", range(300))
def test_the_mirror_equals_the_model_that_remembers_every_path(seed: int) -> None:
    rng = random.Random(seed)
    committed = [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
    tree, model = DraftTree(len(committed)), PathModel()
    ids = Ids("drafter", memory=64)
    seen_frontier = len(committed)  # the drafter's view, which may lag
    for _ in range(60):
        if rng.random() < 0.3:
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
            committed.extend(tokens)
            tree.advance(tokens)
            ids.reconcile(tree)
        if rng.random() < 0.3:
            seen_frontier = rng.randrange(seen_frontier, len(committed) + 1)
        recent = [i for i in model.paths if i > ids.next_id - 20]
        parent = rng.choice([0, *recent])
        guess = Guess(ids.next_id, parent, rng.randrange(3), -1.0)
        model.take(committed, seen_frontier, guess)
        ids.place(tree, committed, seen_frontier, guess)
        assert paths_of(tree, committed) == model.live(committed)
        assert tree.size == len(model.live(committed))
    ids.reconcile(tree)
    assert tree.frontier == len(committed)


def test_a_late_grow_is_walked_over_what_was_committed_meanwhile() -> None:
    committed = [7]
    tree, ids = DraftTree(1), Ids("drafter", memory=32)
    committed += [1, 2, 3]
    tree.advance([1, 2, 3])
    ids.reconcile(tree)
    chain = [Guess(i + 1, i, token, -0.1) for i, token in enumerate([1, 2, 3, 4, 5])]
    placed = [ids.place(tree, committed, 1, guess) for guess in chain]
    assert [node and node.position for node in placed] == [None, None, None, 4, 5]
    assert ids.live == tree.size == 2


def test_a_grow_off_the_committed_path_stands_for_nothing() -> None:
    committed = [7, 1]
    tree, ids = DraftTree(2), Ids("drafter", memory=32)
    assert ids.place(tree, committed, 1, Guess(1, 0, 9, -0.1)) is None
    assert ids.place(tree, committed, 1, Guess(2, 1, 5, -0.1)) is None
    assert tree.size == 0


def test_nodes_of_two_sources_join_and_keep_both_scores() -> None:
    tree = DraftTree(1)
    looked_up = tree.add(None, 4)
    looked_up.scores["lookup"] = -0.7
    ids = Ids("drafter", memory=32)
    assert ids.place(tree, [7], 1, Guess(1, 0, 4, -0.2)) is looked_up
    assert looked_up.scores == {"lookup": -0.7, "drafter": -0.2}
    assert tree.size == 1
    assert ids.live == 1


def test_advance_keeps_the_subtree_of_the_walk_and_drops_the_rest() -> None:
    tree = DraftTree(1)
    a = tree.add(None, 1)
    b = tree.add(a, 2)
    c = tree.add(b, 3)
    other = tree.add(a, 9)
    assert tree.advance([1, 2]) == [a, b]
    assert (a.state, b.state) == (State.COMMITTED, State.COMMITTED)
    assert (c.state, other.state) == (State.LIVE, State.GONE)
    assert tree.children == {3: c}
    assert c.parent is None
    assert tree.size == 1


def test_a_walk_off_the_tree_leaves_it_empty() -> None:
    tree = DraftTree(1)
    tree.add(tree.add(None, 1), 2)
    tree.advance([1, 5, 2])
    assert tree.size == 0
    assert tree.children == {}
    assert tree.frontier == 4


def test_old_ids_are_forgotten_so_that_memory_stays_bounded() -> None:
    committed = [0]
    tree, ids = DraftTree(1), Ids("drafter", memory=8)
    for position in range(1, 200):
        ids.place(tree, committed, position, Guess(ids.next_id, 0, 1, -0.1))
        committed.append(1)
        tree.advance([1])
        ids.reconcile(tree)
    assert len(ids._nodes) <= 9
