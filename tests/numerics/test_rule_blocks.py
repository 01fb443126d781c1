"""One block under each rule: all it can lead to has its exact probability, also at the edges.

The exact probabilities are themselves held against the target's joint distribution.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from protos.messages import TreeNode
from target_workers.acceptance import is_path
from target_workers.model.dist import draw, read
from target_workers.model.noise import as_int64
from target_workers.model.sampling import choose
from target_workers.rules import RULES, Block
from tests.reference import rules as exact
from tests.reference.rules import Outcome, Probs, chi_square_tail, fit, softmax
from tests.reference.worlds import Nodes, seeds

DRAWS, FEW = 2_000, 200
NEVER = -torch.inf
TEMPERATURES = (1e-6, 0.3, 1.0, 10.0)


def random_logits(seed: int, rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


def chain(*tokens: int) -> Nodes:
    return tuple(TreeNode(i - 1, token) for i, token in enumerate(tokens))


def outcomes(rule: str, block: Block, count: int) -> Counter[Outcome]:
    """Of so many draws with other seeds and positions; the block is left as it was."""
    before = block.logits.clone()
    found: Counter[Outcome] = Counter()
    for i, seed in enumerate(seeds(count)):
        path, token = RULES[rule](
            Block(block.nodes, block.logits, block.temperature, seed, 11 + i % 5, block.dists)
        )
        assert is_path(block.nodes, path)
        found[tuple(path), token] += 1
    assert torch.allclose(block.logits, before, rtol=0, atol=0, equal_nan=True)
    return found


def targets_of(block: Block) -> list[Probs]:
    return [softmax(row, block.temperature) for row in block.logits.tolist()]


def drafts_of(block: Block) -> list[Probs]:
    drafts = []
    for dist in block.dists:
        ids, probs = read(dist)
        drafts.append(np.bincount(ids.numpy(), probs.numpy(), block.logits.shape[1]))
    return drafts


def expected(rule: str, block: Block) -> dict[Outcome, float]:
    if rule == "rejection":
        return exact.rejection(block.nodes, targets_of(block))
    return exact.sampled(block.nodes, targets_of(block), drafts_of(block))


def drawn_block(logits: Tensor, draft: Tensor, temperature: float, seed: int) -> Block:
    """A chain drawn from the rows of `draft`, to be verified with `logits`."""
    pairs = [draw(row, temperature, seed, 11 + i) for i, row in enumerate(draft)]
    nodes = chain(*(token for token, _ in pairs))
    return Block(nodes, logits, temperature, 0, 11, tuple(dist for _, dist in pairs))


TREES = [
    (),
    (TreeNode(-1, 3), TreeNode(-1, 0), TreeNode(0, 1), TreeNode(0, 2), TreeNode(3, 2)),
    (TreeNode(-1, 1), TreeNode(0, 1), TreeNode(-1, 2), TreeNode(1, 0), TreeNode(1, 3)),
    tuple(TreeNode(-1, token) for token in (2, 0, 3, 1, 4)),  # all there is
]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.4, 1.5])
def test_a_tree_leads_by_rejection_to_what_it_should(tree: Nodes, temperature: float) -> None:
    block = Block(tree, random_logits(1, 1 + len(tree), 5), temperature, 0, 0)
    assert fit(outcomes("rejection", block, DRAWS), expected("rejection", block)).is_good


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_leads_by_sampled_to_what_it_should(seed: int) -> None:
    draft = random_logits(10 + seed, 2, 6)
    draft[draft < draft.topk(4).values[:, -1:]] = NEVER  # draft(x) is of a few tokens only
    block = drawn_block(random_logits(seed, 3, 6), draft, 0.8, seed)
    assert fit(outcomes("sampled", block, DRAWS), expected("sampled", block)).is_good


@pytest.mark.parametrize("rule", ["rejection", "sampled"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_extreme_temperatures_are_exact(rule: str, temperature: float) -> None:
    for seed in range(3):
        logits = random_logits(seed, 3, 4)
        block = drawn_block(logits, random_logits(20 + seed, 2, 4), temperature, seed)
        found = fit(outcomes(rule, block, FEW), expected(rule, block))
        assert found.is_good, (seed, found)


@pytest.mark.parametrize("rule", ["rejection", "sampled"])
def test_what_is_certain_always_happens(rule: str) -> None:
    """One-hot targets, guesses that cannot be, and a drafter that is the target."""
    certain = torch.full((3, 5), NEVER)
    certain[[0, 1, 2], [2, 4, 0]] = 1.0
    right = drawn_block(certain, certain[:2], 0.7, 0)
    assert set(outcomes(rule, right, FEW)) == {((0, 1), 0)}
    draft = certain[:2].roll(1, 1)
    wrong = drawn_block(certain, draft, 0.7, 0)
    assert set(outcomes(rule, wrong, FEW)) == {((), 2)}
    if rule == "sampled":
        logits = random_logits(2, 4, 6)
        for seed in range(10):
            same = drawn_block(logits, logits[:3], 0.9, seed)
            assert {path for path, _ in outcomes(rule, same, 40)} == {(0, 1, 2)}


def test_a_one_hot_draft_is_a_point_mass() -> None:
    """A greedy drafter may say so: then `sampled` is what `rejection` is on a chain."""
    draft = torch.full((2, 4), NEVER)
    draft[[0, 1], [3, 1]] = 0.0
    block = drawn_block(random_logits(4, 3, 4), draft, 1.0, 0)
    points = expected("rejection", block)
    assert expected("sampled", block) == pytest.approx(points)
    assert fit(outcomes("sampled", block, DRAWS), points).is_good


def test_rows_off_the_walk_may_be_anything() -> None:
    """Only what lies on the walk counts; the rest may be broken or have nothing to choose."""
    logits = torch.full((4, 4), NEVER)
    logits[[0, 1], [2, 3]] = 0.0
    logits[2] = torch.nan
    tree = (TreeNode(-1, 2), TreeNode(-1, 0), TreeNode(1, 1))
    for rule in ("rejection", "typical"):
        assert set(outcomes(rule, Block(tree, logits, 1.0, 0, 0), FEW)) == {((0,), 3)}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_typical_walks_as_far_as_guesses_are_typical(temperature: float) -> None:
    lengths = set()
    for seed in range(60):
        logits = random_logits(seed, 6, 6)
        block = Block(TREES[1 + seed % 2], logits, temperature, seed, 3)
        targets = targets_of(block)
        path, token = RULES["typical"](block)
        assert is_path(block.nodes, path) and 0 <= token < 6
        assert len(path) == exact.longest_typical(block.nodes, targets)
        parents = (-1, *path)
        for parent, i in zip(parents, path, strict=False):
            assert exact.is_typical(targets[1 + parent], block.nodes[i].token)
        lengths.add(len(path))
    assert len(lengths) > 1


def test_a_draw_is_from_what_it_states() -> None:
    logits = random_logits(3, 1, 9)[0]
    probs = drafts_of(drawn_block(logits.repeat(2, 1), logits[None], 0.7, 0))[0]
    assert probs == pytest.approx(softmax(logits.tolist(), 0.7), abs=1e-6)
    for positions in (range(1), range(DRAWS)):
        pairs = [
            draw(logits, 0.7, seed, positions[i % len(positions)])
            for i, seed in enumerate(seeds(DRAWS))
        ]
        counts = Counter(token for token, _ in pairs)
        assert fit(counts, {v: float(p) for v, p in enumerate(probs)}).is_good


def test_a_wide_draft_is_of_its_best_tokens() -> None:
    logits = torch.zeros(500)
    logits[100:130] = 2.0
    ids, probs = read(draw(logits, 1.0, 1, 1)[1])
    wanted = [*range(64 - 30), *range(100, 130)]
    assert ids.tolist() == wanted, "of equals the lowest ids"
    odds = logits[wanted].double().exp()
    assert probs.tolist() == pytest.approx((odds / odds.sum()).tolist(), abs=1e-6)


def test_a_draft_has_its_own_noise() -> None:
    """The target's own choice with the same seed and position tells nothing of what is drawn."""
    logits = random_logits(6, 1, 4)[0] * 0.5
    ours = torch.tensor([draw(logits, 1.0, seed, 7)[0] for seed in range(DRAWS)])
    one = torch.ones(DRAWS, dtype=torch.float64)
    rows, keys = logits.repeat(DRAWS, 1), as_int64(seeds(DRAWS))
    theirs = choose(rows, one, keys, torch.full((DRAWS,), 7)).tokens
    share = softmax(logits.tolist(), 1.0)
    pairs = itertools.product(range(4), repeat=2)
    joint = {(a, b): float(share[a] * share[b]) for a, b in pairs}
    counts = Counter(zip(ours.tolist(), theirs.tolist(), strict=True))
    assert fit(counts, joint).is_good


After = dict[tuple[int, ...], Probs]


def outputs(rule: str, rows: After, draft: After) -> Counter[tuple[int, ...]]:
    """The exact distribution of two tokens, over all chains of two that can be drawn."""
    found: Counter[tuple[int, ...]] = Counter()
    vocab = len(rows[()])
    for tokens in itertools.product(range(vocab), repeat=2):
        nodes, paths = chain(*tokens), [(), tokens[:1], tokens]
        targets, drafts = [rows[path] for path in paths], [draft[path] for path in paths[:2]]
        weight = drafts[0][tokens[0]] * drafts[1][tokens[1]]
        if rule == "sampled":
            led = exact.sampled(nodes, targets, drafts)
        else:
            led = getattr(exact, rule)(nodes, targets)
        for (path, token), share in led.items():
            output = (*tokens[: len(path)], token)
            for more in itertools.product(range(vocab), repeat=max(0, 2 - len(output))):
                after = rows[output][more[0]] if more else 1.0
                found[(*output, *more)[:2]] += weight * share * after
    return found


@pytest.mark.parametrize("rule", ["match", "rejection", "sampled"])
def test_the_exact_probabilities_add_up_to_the_target(rule: str) -> None:
    logits, guesses = random_logits(7, 13, 3), random_logits(8, 13, 3)
    paths = [p for length in range(3) for p in itertools.product(range(3), repeat=length)]
    rows = {path: softmax(logits[i].tolist(), 1.0) for i, path in enumerate(paths)}
    draft = {path: softmax(guesses[i].tolist(), 1.0) for i, path in enumerate(paths)}
    found = outputs(rule, rows, draft)
    for a, b in itertools.product(range(3), repeat=2):
        assert found[a, b] == pytest.approx(rows[()][a] * rows[a,][b], abs=1e-12)


def test_match_and_rejection_are_the_same_walk() -> None:
    targets = [softmax(row, 1.0) for row in random_logits(9, 6, 5).tolist()]
    for tree in TREES:
        rows = targets[: 1 + len(tree)]
        assert exact.match(tree, rows) == pytest.approx(exact.rejection(tree, rows))


def test_the_tail_of_chi_square_is_the_known_one() -> None:
    """Quantiles from tables: 5% and 1%."""
    for freedom, five, one in ((1, 3.841459, 6.634897), (10, 18.307038, 23.209251)):
        assert chi_square_tail(five, freedom) == pytest.approx(0.05, abs=1e-6)
        assert chi_square_tail(one, freedom) == pytest.approx(0.01, abs=1e-6)
    assert fit({0: 10}, {0: 1.0}).is_good
    assert not fit({0: 10, 1: 1}, {0: 1.0}).is_good, "what cannot be was seen"
