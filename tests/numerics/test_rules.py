"""The verification rules draw from exactly the target's distribution, and mistakes are seen.

Outputs of three tokens are generated round by round in toy worlds and held against the exact joint
distribution. 10,000 outputs run always; 100,000 are a long test, where the total variation must be
small too. A mistake must show already in a thousand or two.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.messages import TreeNode
from target_workers.model.dist import draw, read
from target_workers.model.noise import as_int64, gumbel
from target_workers.rules import RULES, Block
from tests.reference import worlds
from tests.reference.rules import Outcome, fit, softmax
from tests.reference.worlds import (
    START,
    Guesses,
    Propose,
    Tokens,
    World,
    all_tokens,
    best_first,
    by_noise,
    counted,
    counted_by_match,
    drawn,
    make_world,
    mixed,
    nothing,
)

SHORT, LONG, FEW = 10_000, 100_000, 1_000
NEVER = -torch.inf
SMALL = make_world(1, 3, spread=1.0, temperature=1.0, unlike=1.0)
MIDDLE = make_world(2, 4, spread=2.0, temperature=0.7, unlike=2.0)
LARGE = make_world(3, 8, spread=4.0, temperature=2.0, unlike=3.0)
APART = make_world(4, 4, spread=0.7, temperature=1.0, unlike=1.0)  # where mistakes show soon
FAR = make_world(4, 4, spread=0.7, temperature=1.0, unlike=2.0)
SAME = make_world(5, 4, spread=2.0, temperature=0.8, unlike=0.0)

MATCH = [(SMALL, mixed), (MIDDLE, by_noise), (MIDDLE, best_first), (LARGE, mixed)]
REJECTION = [(FAR, mixed), (LARGE, mixed), (SMALL, all_tokens), (MIDDLE, by_noise)]
REJECTION += [(MIDDLE, best_first)]
SAMPLED = [(MIDDLE, drawn), (SMALL, drawn), (LARGE, drawn), (SAME, drawn)]


def named(cases: list[tuple[World, Propose]]) -> list[str]:
    return [f"{world.vocab}-{propose.__name__}-{i}" for i, (world, propose) in enumerate(cases)]


@pytest.mark.parametrize(("world", "propose"), MATCH, ids=named(MATCH))
def test_outputs_by_match_have_the_exact_joint(world: World, propose: Propose) -> None:
    assert fit(counted_by_match(world, propose, SHORT), world.joint()).is_good


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "propose"), REJECTION[:1], ids=named(REJECTION[:1]))
def test_outputs_by_rejection_have_the_exact_joint(world: World, propose: Propose) -> None:
    assert fit(counted(world, propose, RULES["rejection"], SHORT), world.joint()).is_good


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "propose"), SAMPLED[:1], ids=named(SAMPLED[:1]))
def test_outputs_by_sampled_have_the_exact_joint(world: World, propose: Propose) -> None:
    assert fit(counted(world, propose, RULES["sampled"], SHORT), world.joint()).is_good


LONG_CASES = [("match", *case) for case in [*MATCH, (LARGE, nothing)]]
LONG_CASES += [("rejection", *case) for case in REJECTION[1:]]
LONG_CASES += [("sampled", *case) for case in SAMPLED]
LONG_IDS = [f"{rule}-{propose.__name__}-{world.vocab}" for rule, world, propose in LONG_CASES]


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("rule", "world", "propose"), LONG_CASES, ids=LONG_IDS)
def test_many_outputs_are_as_near_as_they_can_be(rule: str, world: World, propose: Propose) -> None:
    if rule == "match":
        counts = counted_by_match(world, propose, LONG)
    else:
        counts = counted(world, propose, RULES[rule], LONG)
    found = fit(counts, world.joint())
    assert found.is_good
    assert found.distance <= 0.01, found


def from_whole_target(rule: str) -> worlds.Decide:
    """The wrong residual: after a rejection the token is drawn from the target as it was."""

    def decide(block: Block) -> Outcome:
        path, token = RULES[rule](block)
        at = path[-1] if path else -1
        if all(node.parent != at for node in block.nodes):
            return path, token
        target = softmax(block.logits[1 + at].tolist(), block.temperature)
        rng = np.random.default_rng((block.seed, block.start + len(path)))
        return path, int(rng.choice(len(target), p=target))

    return decide


def at_one_position(rule: str) -> worlds.Decide:
    """Noise shared between positions: that of the first token in every round."""
    return lambda block: RULES[rule](replace(block, start=START))


def with_the_drafters_noise(block: Block) -> Outcome:
    """The right residual, drawn with the noise that ranked the guesses."""
    path, token = RULES["rejection"](block)
    at = path[-1] if path else -1
    left = block.logits[1 + at].double() / block.temperature
    left[[node.token for node in block.nodes if node.parent == at]] = NEVER
    if left.isneginf().all():
        return path, token
    position = torch.tensor([block.start + len(path)])
    noise = gumbel(as_int64([block.seed]), position, torch.arange(len(left)))
    return path, int((left + noise).argmax())


def greedy(world: World, prefix: Tokens, seed: int) -> Guesses:
    """The best token each time, beside the softmax as if drawn from it."""
    nodes: list[TreeNode] = []
    dists, path = [], prefix
    for depth in range(2):
        logits = world.draft[world.context(path)]
        dists.append(draw(logits, world.temperature, seed, START + len(path))[1])
        nodes.append(TreeNode(depth - 1, int(logits.argmax())))
        path = (*path, nodes[-1].token)
    return tuple(nodes), tuple(dists)


def likely_only(world: World, prefix: Tokens, seed: int) -> Guesses:
    """A chain drawn well, and verified as far as its tokens turned out likely."""
    nodes, dists = drawn(world, prefix, seed)
    count = 0
    for node, dist in zip(nodes, dists, strict=True):
        ids, probs = read(dist)
        if float(probs[ids == node.token].sum()) < 0.4:
            break
        count += 1
    return nodes[:count], dists[:count]


def of_the_best_two(world: World, prefix: Tokens, seed: int) -> Guesses:
    """Drawn from the two best, beside the softmax of all."""
    logits = world.draft[world.context(prefix)]
    cut = logits.where(logits >= logits.topk(2).values[-1], NEVER)
    position = START + len(prefix)
    token = draw(cut, world.temperature, seed, position)[0]
    dist = draw(logits, world.temperature, seed, position)[1]
    return (TreeNode(-1, token),), (dist,)


MISTAKES = {
    "target as residual": (APART, drawn, from_whole_target("sampled")),
    "drafted greedily": (APART, greedy, RULES["sampled"]),
    "selected by the drawn probability": (APART, likely_only, RULES["sampled"]),
    "another draft(x)": (APART, of_the_best_two, RULES["sampled"]),
    "one position": (APART, drawn, at_one_position("sampled")),
    "target as residual of a tree": (APART, best_first, from_whole_target("rejection")),
    "one position for trees": (APART, best_first, at_one_position("rejection")),
    "noise of the drafter": (FAR, by_noise, with_the_drafters_noise),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    world, propose, decide = MISTAKES[mistake]
    count = 2 * FEW if world is FAR else FEW
    found = fit(counted(world, propose, decide, count), world.joint())
    assert not found.is_good, found


def test_noise_shared_between_positions_is_seen_under_match() -> None:
    counts = counted_by_match(APART, best_first, FEW, shared_noise=True)
    assert not fit(counts, APART.joint()).is_good


def test_what_the_mistakes_are_made_of_is_good_without_them() -> None:
    for propose, rule in ((best_first, "rejection"), (drawn, "sampled")):
        assert fit(counted(APART, propose, RULES[rule], FEW), APART.joint()).is_good
    assert fit(counted_by_match(APART, best_first, FEW), APART.joint()).is_good
