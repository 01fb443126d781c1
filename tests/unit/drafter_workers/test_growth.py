"""What grows next: best reach first, within credit, floor and context, through every re-rooting."""

import math
import random

import pytest

from drafter_workers.config import GrowthConfig
from drafter_workers.growth import Growth
from drafter_workers.proposer import Candidate
from protos.draft_tree import Node
from protos.messages import Guess


def candidates(**chances: float) -> list[Candidate]:
    """By name: t5=.5 is token 5 with that probability."""
    return [Candidate(int(name[1:]), math.log(chance)) for name, chance in chances.items()]


def make(credit: int = 32, width: int = 3, context: int = 100, floor: float = 0.01) -> Growth:
    return Growth(10, credit, GrowthConfig(width=width, floor=floor), context)


def leaf_tokens(growth: Growth) -> list[int | None]:
    """The tokens of the leaves in the order they should be expanded; None is the root."""
    return [leaf.node.token if leaf.node else None for leaf in growth.leaves()]


def node_of(growth: Growth, *path: int) -> Node:
    children = growth.tree.children
    for token in path:
        node = children[token]
        children = node.children
    return node


def test_a_new_tree_grows_from_its_root() -> None:
    growth = make()
    (leaf,) = growth.leaves()
    assert (leaf.node, leaf.reach, leaf.depth) == (None, 0.0, 0)
    growth.expand(None, candidates(t5=0.5, t6=0.3, t7=0.1))
    assert [(g.id, g.parent, g.token) for g in growth.send()[0]] == [
        (1, 0, 5),
        (2, 0, 6),
        (3, 0, 7),
    ]
    assert growth.send()[0] == ()
    assert leaf_tokens(growth) == [5, 6, 7]


def test_leaves_are_ordered_by_the_product_along_their_path() -> None:
    growth = make()
    growth.expand(None, candidates(t5=0.6, t6=0.35))
    growth.send()
    growth.expand(node_of(growth, 5), candidates(t8=0.7, t9=0.1))
    growth.send()
    assert leaf_tokens(growth) == [8, 6, 9]
    reaches = [math.exp(leaf.reach) for leaf in growth.leaves()]
    assert reaches == pytest.approx([0.42, 0.35, 0.06])


def test_ids_and_paths_follow_the_tree() -> None:
    growth = make()
    growth.expand(None, candidates(t5=0.6, t6=0.35))
    growth.send()
    growth.expand(node_of(growth, 6), candidates(t8=0.7))
    assert growth.send()[0] == (Guess(3, 2, 8, math.log(0.7)),)
    assert growth.path(node_of(growth, 6, 8)) == (2, 3)
    assert growth.path(None) == ()


def test_what_is_below_the_floor_is_sent_once_a_new_root_lifts_it() -> None:
    growth = make(floor=0.05)
    growth.expand(None, candidates(t5=0.1))
    growth.send()
    growth.expand(node_of(growth, 5), candidates(t6=0.3, t7=0.01))
    assert growth.send()[0] == ()
    assert growth.advance((5,)) == [1]
    assert growth.send()[0] == (Guess(2, 0, 6, math.log(0.3)),)
    assert growth.send()[0] == ()


def test_held_candidates_of_lost_nodes_are_never_sent() -> None:
    growth = make(floor=0.05)
    growth.expand(None, candidates(t5=0.1, t6=0.1))
    growth.send()
    for token in (5, 6):
        growth.expand(node_of(growth, token), candidates(t7=0.3))
    growth.advance((5, 9))
    assert growth.send()[0] == ()
    assert leaf_tokens(growth) == [None]


def test_credit_bounds_the_live_nodes_and_is_given_back_by_the_root_moving() -> None:
    growth = make(credit=2)
    growth.expand(None, candidates(t5=0.5, t6=0.3, t7=0.1))
    assert [guess.token for guess in growth.send()[0]] == [5, 6]
    assert list(growth.leaves()) == []
    growth.credit = 5
    assert leaf_tokens(growth) == [5], "the best leaf claims room for all its children"
    assert growth.send()[0] == (), "before a less likely candidate"
    growth.advance((6,))
    assert growth.tree.size == 0
    assert leaf_tokens(growth) == [None]


def test_credit_that_no_better_leaf_claims_goes_to_held_candidates() -> None:
    growth = make(credit=1)
    growth.expand(None, candidates(t5=0.6, t6=0.3))
    growth.send()
    growth.expand(node_of(growth, 5), [])
    growth.credit = 2
    assert [guess.token for guess in growth.send()[0]] == [6]


def test_without_credit_nothing_grows() -> None:
    growth = make(credit=0)
    assert list(growth.leaves()) == []
    growth.credit = 1
    assert leaf_tokens(growth) == [None]


def test_a_leaf_is_expanded_while_its_children_still_fit_the_context() -> None:
    growth = make(context=12)
    growth.expand(None, candidates(t5=0.9))
    growth.send()
    assert leaf_tokens(growth) == [5]
    growth.expand(node_of(growth, 5), candidates(t6=0.9))
    growth.send()
    assert node_of(growth, 5, 6).position == 11
    assert leaf_tokens(growth) == []


def test_a_full_context_grows_nothing_even_from_the_root() -> None:
    assert leaf_tokens(make(context=11)) == [None]
    assert leaf_tokens(make(context=10)) == []


def test_a_hit_keeps_what_is_below_and_what_was_expanded() -> None:
    growth = make()
    growth.expand(None, candidates(t5=0.6))
    growth.send()
    growth.expand(node_of(growth, 5), candidates(t6=0.5, t7=0.2))
    growth.send()
    growth.expand(node_of(growth, 5, 7), candidates(t8=0.5))
    growth.send()
    assert growth.advance((5, 7)) == [1, 3]
    assert leaf_tokens(growth) == [8]
    (leaf,) = growth.leaves()
    assert math.exp(leaf.reach) == pytest.approx(0.5)
    assert growth.path(leaf.node) == (4,)


def test_a_walk_to_an_unexpanded_leaf_leaves_a_root_to_expand() -> None:
    growth = make()
    growth.expand(None, candidates(t5=0.6))
    growth.send()
    assert growth.advance((5,)) == [1]
    assert leaf_tokens(growth) == [None]


def test_a_miss_starts_anew_and_ids_run_on() -> None:
    growth = make()
    growth.expand(None, candidates(t5=0.6, t6=0.2))
    growth.send()
    assert growth.advance((5, 9)) == [1]
    assert growth.tree.frontier == 12
    growth.expand(None, candidates(t6=0.6))
    assert growth.send()[0] == (Guess(3, 0, 6, math.log(0.6)),)


def test_no_new_tokens_change_nothing() -> None:
    growth = make()
    growth.expand(None, candidates(t5=0.6))
    growth.send()
    assert growth.advance(()) == []
    assert leaf_tokens(growth) == [5]


@pytest.mark.parametrize("seed", range(40))
def test_growth_equals_its_definition_after_any_history(seed: int) -> None:
    """Every node's reach is recomputed from the scores on its path; nothing likelier was left."""
    draw = random.Random(seed)
    growth = make(credit=draw.choice((3, 8, 40)), width=draw.choice((1, 3)), floor=0.02)
    for _ in range(40):
        leaves = list(growth.leaves())
        for leaf in draw.sample(leaves, min(len(leaves), 2)):
            tokens = draw.sample(range(8), draw.randint(0, 3))
            growth.expand(leaf.node, [Candidate(t, math.log(draw.random())) for t in tokens])
        growth.send()
        assert growth.tree.size <= growth.credit
        for leaf in growth.leaves():
            assert leaf.reach == pytest.approx(_reach(leaf.node))
            assert not leaf.node or math.exp(leaf.reach) >= 0.02
        if draw.random() < 0.3:
            growth.advance(_walk(draw, growth))
            assert growth.tree.size == sum(1 for _ in growth.tree.walk())


def _reach(node: Node | None) -> float:
    reach = 0.0
    while node is not None:
        reach += node.scores["drafter"]
        node = node.parent
    return reach


def _walk(draw: random.Random, growth: Growth) -> list[int]:
    tokens: list[int] = []
    children = growth.tree.children
    while children and draw.random() < 0.8:
        token = draw.choice(list(children))
        tokens.append(token)
        children = children[token].children
    return [*tokens, draw.randrange(8)]
