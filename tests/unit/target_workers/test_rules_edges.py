"""The rules where numbers run out, where rows are bad, and what a walk always is."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from protos.messages import TreeNode
from protos.sampling import RULES as NAMES
from target_workers.acceptance import is_path
from target_workers.model.dist import draw, write
from target_workers.model.noise import as_int64
from target_workers.model.sampling import choose, top_perturbed
from target_workers.rules import RULES, Block
from target_workers.rules.sampled import chain_error

INF = math.inf
EVERY = sorted(RULES)
TREES = ["rejection", "typical"]


def shares(*probs: float) -> Tensor:
    """Logits of a distribution; a share of 0 is a masked token."""
    return torch.tensor(probs, dtype=torch.float64).log().float()


def one_hot(token: int, vocab: int = 6) -> Tensor:
    return shares(*(float(token == i) for i in range(vocab)))


def chain(*tokens: int) -> tuple[TreeNode, ...]:
    return tuple(TreeNode(i - 1, token) for i, token in enumerate(tokens))


def sure(token: int) -> bytes:
    """The distribution of a drafter that never draws anything else."""
    return write(torch.tensor([token]), torch.ones(1))


def block(
    nodes: Sequence[TreeNode], rows: Sequence[Tensor], seed: int = 0, temperature: float = 1.0
) -> Block:
    """With point masses beside the nodes, which is what rule `rejection` assumes anyway."""
    dists = [sure(node.token) for node in nodes]
    return Block(nodes, torch.stack(list(rows)), temperature, seed, 40, dists)


def random_chain(seed: int, length: int, vocab: int, start: int = 40) -> Block:
    """A chain drawn from a drafter that differs from the target."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1 + length, vocab, generator=generator) * 2
    guesses = logits + torch.randn(1 + length, vocab, generator=generator)
    drawn = [draw(guesses[i], 0.9, seed, start + i) for i in range(length)]
    nodes = chain(*(token for token, _ in drawn))
    return Block(nodes, logits, 0.9, seed, start, [dist for _, dist in drawn])


def random_tree(seed: int, count: int, vocab: int) -> Block:
    """Some of it deep, some of it wide."""
    rng = random.Random(seed)
    nodes: list[TreeNode] = []
    while len(nodes) < count:
        newest = len(nodes) - 1
        parent = newest if rng.random() < 0.6 else rng.randint(-1, newest)
        node = TreeNode(parent, rng.randrange(vocab))
        if node not in nodes:
            nodes.append(node)
    logits = torch.randn(1 + count, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    for node in nodes:  # likely enough that walks are long
        logits[1 + node.parent, node.token] += 2
    return Block(nodes, logits, 0.9, seed, 40)


def test_every_rule_has_a_name_and_every_name_but_match_a_rule() -> None:
    assert {"match", *RULES} == set(NAMES)


@pytest.mark.parametrize("name", EVERY)
def test_without_guesses_the_target_draws(name: str) -> None:
    row = shares(0.5, 0.0, 0.3, 0.2)
    results = [RULES[name](block((), [row], seed)) for seed in range(2000)]
    assert {walk for walk, _ in results} == {()}
    counts = Counter(token for _, token in results)
    assert set(counts) == {0, 2, 3}
    assert abs(counts[0] / 2000 - 0.5) < 0.05 and abs(counts[2] / 2000 - 0.3) < 0.05


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("seed", range(20))
def test_what_the_target_is_sure_of_always_stands(name: str, seed: int) -> None:
    rows = [one_hot(token) for token in (3, 1, 4, 5)]
    assert RULES[name](block(chain(3, 1, 4), rows, seed)) == ((0, 1, 2), 5)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("seed", range(20))
def test_a_guess_that_cannot_follow_never_stands_nor_does_anything_after_it(
    name: str, seed: int
) -> None:
    rows = [one_hot(token) for token in (3, 2, 4, 5)]
    assert RULES[name](block(chain(3, 1, 4), rows, seed)) == ((0,), 2)


@pytest.mark.parametrize("name", EVERY)
def test_masked_tokens_are_neither_accepted_nor_drawn(name: str) -> None:
    row = shares(0.4, 0.0, 0.6, 0.0)
    for seed in range(200):
        walk, token = RULES[name](block(chain(1), [row, row], seed))
        assert walk == () and token in (0, 2)
        walk, token = RULES[name](block(chain(2), [row, row], seed))
        assert token in (0, 2)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-4, 1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_every_temperature_is_defined(name: str, temperature: float, scale: float) -> None:
    row = torch.tensor((-1.0, 0.25, 1.0, -INF, 0.5)) * scale
    for guess in (2, 0, 3):
        walk, token = RULES[name](block(chain(guess), [row, row], 7, temperature))
        assert token in (0, 1, 2, 4)
        if temperature <= 1e-3:  # what is not the best token is out of reach
            assert (walk, token) == ((0,) if guess == 2 else (), 2)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("bad", [(math.nan, 0.0, 1.0), (INF, 0.0, 1.0), (-INF, -INF, -INF)])
def test_a_walk_ends_without_a_token_where_logits_are_not_finite(
    name: str, bad: tuple[float, ...]
) -> None:
    good, wrong = one_hot(0, 3), torch.tensor(bad)
    assert RULES[name](block((), [wrong])) == ((), -1)
    for guess in range(3):
        assert RULES[name](block(chain(0, guess), [good, wrong, good])) == ((0,), -1)
    assert RULES[name](block(chain(0, 0), [good, good, wrong])) == ((0, 1), -1)
    assert RULES[name](block(chain(1, 0), [good, wrong, wrong])) == ((), 0)


@pytest.mark.parametrize("name", EVERY)
def test_the_same_block_gives_the_same_answer_whatever_else_is_in_the_batch(name: str) -> None:
    for seed in range(20):
        alone = random_chain(seed, 4, 40)
        batch = torch.full((30, 40), math.nan)
        batch[11:16] = alone.logits
        before = alone.logits.clone()
        first = RULES[name](alone)
        assert first == RULES[name](replace(alone, logits=batch[11:16]))
        assert torch.equal(alone.logits, before)


@pytest.mark.parametrize("name", EVERY)
def test_seed_and_position_decide(name: str) -> None:
    case = replace(random_chain(3, 4, 40), logits=torch.zeros(5, 40))
    results = {RULES[name](replace(case, seed=seed)) for seed in range(60)}
    assert len(results) > 15
    results = {RULES[name](replace(case, start=start)) for start in range(60)}
    assert len(results) > 15
    for seed in (0, (1 << 63) - 1, (1 << 64) - 1):
        assert RULES[name](replace(case, seed=seed)) == RULES[name](replace(case, seed=seed))


@pytest.mark.parametrize("name", EVERY)
def test_a_chain_cut_in_two_is_decided_as_in_one(name: str) -> None:
    walked = 0
    for seed in range(60):
        whole = random_chain(seed, 6, 12)
        path, token = RULES[name](whole)
        assert path == tuple(range(len(path)))
        walked += len(path)
        for cut in range(1, 6):
            upper = replace(
                whole,
                nodes=whole.nodes[:cut],
                logits=whole.logits[: cut + 1],
                dists=whole.dists[:cut],
            )
            assert RULES[name](upper)[0] == path[:cut]
            if len(path) < cut:
                assert RULES[name](upper)[1] == token
                continue
            lower = Block(
                chain(*(node.token for node in whole.nodes[cut:])),
                whole.logits[cut:],
                whole.temperature,
                whole.seed,
                whole.start + cut,
                whole.dists[cut:],
            )
            assert RULES[name](lower) == (tuple(range(len(path) - cut)), token)
    assert walked > 20


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("seed", range(25))
def test_a_walk_is_a_path_and_no_token_after_it_is_a_child_that_was_refused(
    name: str, seed: int
) -> None:
    tree = random_tree(seed, 60, 12)
    path, token = RULES[name](tree)
    assert is_path(tree.nodes, path)
    assert 0 <= token < 12
    if name == "rejection":
        assert TreeNode(path[-1] if path else -1, token) not in tree.nodes


@pytest.mark.parametrize("name", TREES)
def test_walks_of_deep_trees_are_deep(name: str) -> None:
    nodes = [TreeNode(i // 2 * 2 - 2 if i > 1 else -1, i % 2) for i in range(80)]
    rows = [shares(0.9, 0.1, 1e-9)] * 81
    depths = [len(RULES[name](block(nodes, rows, seed))[0]) for seed in range(20)]
    assert max(depths) >= 10


@pytest.mark.parametrize("seed", range(100))
def test_siblings_with_all_the_mass_leave_nothing_to_draw(seed: int) -> None:
    row = shares(0.2, 0.0, 0.7, 0.1)
    nodes = (TreeNode(-1, 2), TreeNode(-1, 1), TreeNode(-1, 0), TreeNode(-1, 3))
    path, _ = RULES["rejection"](block(nodes, [row] * 5, seed))
    assert path in ((0,), (2,), (3,))


def test_siblings_stand_one_after_the_other() -> None:
    row = shares(0.2, 0.3, 0.4, 0.1)
    nodes = (TreeNode(-1, 1), TreeNode(-1, 0), TreeNode(0, 3), TreeNode(-1, 3))
    counts: Counter[int] = Counter()
    for seed in range(2000):
        path, token = RULES["rejection"](block(nodes, [row] * 5, seed))
        counts[nodes[path[0]].token if path else token] += 1
        assert path or token == 2
    for token, prob in enumerate((0.2, 0.3, 0.4, 0.1)):
        assert abs(counts[token] / 2000 - prob) < 4 * math.sqrt(prob * (1 - prob) / 2000)


@pytest.mark.parametrize("seed", range(30))
def test_whether_a_sibling_stands_does_not_depend_on_those_after_it(seed: int) -> None:
    tree = random_tree(seed, 30, 12)
    path, token = RULES["rejection"](tree)
    on_path = {-1, *path}
    # What hangs under nodes that were refused is nobody's business.
    for i in range(len(tree.nodes)):
        if i not in on_path:
            tree.logits[1 + i] = math.nan
    assert RULES["rejection"](tree) == (path, token)
    kept = [i for i, node in enumerate(tree.nodes) if i in on_path or node.parent in on_path]
    later = {
        i for i in kept if any(tree.nodes[j].parent == tree.nodes[i].parent for j in path if j < i)
    }
    kept = [i for i in kept if i not in later]
    index = {-1: -1} | {i: new for new, i in enumerate(kept)}
    nodes = [TreeNode(index[tree.nodes[i].parent], tree.nodes[i].token) for i in kept]
    rows = tree.logits[[0, *(1 + i for i in kept)]]
    smaller = replace(tree, nodes=nodes, logits=rows)
    assert RULES["rejection"](smaller) == (tuple(index[i] for i in path), token)


@pytest.mark.parametrize(("uniform", "path"), [(0.72, (1,)), (0.74, (2,))])
def test_a_rest_that_is_tiny_is_still_shared_out_exactly(
    uniform: float, path: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = torch.tensor((0.0, -35.0, -36.0))  # of what the first leaves, the second has .731
    drawn = [1 - 2.0**-53, uniform, 0.5]
    monkeypatch.setattr(Block, "uniforms", lambda self, depth, count: drawn)
    nodes = (TreeNode(-1, 0), TreeNode(-1, 1), TreeNode(-1, 2))
    assert RULES["rejection"](block(nodes, [row] * 4))[0] == path


@pytest.mark.parametrize("seed", range(50))
def test_a_drafter_equal_to_the_target_is_never_refused(seed: int) -> None:
    row = torch.tensor((0.0, 0.0, -INF, 0.0, 0.0))
    token, dist = draw(row, 1.0, seed, 40)
    case = Block(chain(token), torch.stack((row, row)), 1.0, seed, 40, [dist])
    assert RULES["sampled"](case)[0] == (0,)


def test_where_rounding_leaves_no_residual_the_target_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Block, "uniforms", lambda self, depth, count: [1.0] * count)
    row = torch.tensor((0.0, 0.0, 0.0, 0.0, -INF))
    dist = write(torch.arange(4), torch.full((4,), 0.25))
    tokens = set()
    for seed in range(50):
        case = Block(chain(0), torch.stack((row, row)), 1.0, seed, 40, [dist])
        path, token = RULES["sampled"](case)
        assert path == ()
        tokens.add(token)
    assert tokens == {0, 1, 2, 3}


def test_a_point_mass_stands_as_often_as_the_target_says() -> None:
    row = shares(0.3, 0.7, 0.0)
    results = [RULES["sampled"](block(chain(0), [row, row], seed)) for seed in range(2000)]
    refused = [token for path, token in results if not path]
    assert set(refused) == {1}
    assert abs(1 - len(refused) / 2000 - 0.3) < 0.05


def test_a_smaller_draft_vocabulary_leaves_the_rest_to_the_target() -> None:
    row = shares(0.1, 0.2, 0.3, 0.4)
    counts: Counter[int] = Counter()
    for seed in range(2000):
        token, dist = draw(shares(0.8, 0.0, 0.2, 0.0), 1.0, seed, 40)
        path, last = RULES["sampled"](
            Block(chain(token), torch.stack((row, row)), 1.0, seed, 40, [dist])
        )
        counts[token if path else last] += 1
    for token, prob in enumerate((0.1, 0.2, 0.3, 0.4)):
        assert abs(counts[token] / 2000 - prob) < 4 * math.sqrt(prob * (1 - prob) / 2000)


def test_ids_that_the_target_pads_get_nothing() -> None:
    row = torch.cat((shares(0.5, 0.5), torch.full((3,), -INF)))
    dist = write(torch.arange(5), torch.full((5,), 0.2))
    for seed in range(100):
        case = Block(chain(3), torch.stack((row, row)), 1.0, seed, 40, [dist])
        path, token = RULES["sampled"](case)
        assert path == () and token in (0, 1)


@pytest.mark.parametrize(
    ("nodes", "dists", "why"),
    [
        ((TreeNode(-1, 1), TreeNode(-1, 2)), (sure(1), sure(2)), "one chain"),
        ((TreeNode(-1, 1), TreeNode(0, 2), TreeNode(0, 3)), (sure(1), sure(2), sure(3)), "chain"),
        (chain(1, 2), (), "2 nodes come with 0"),
        (chain(1), (sure(1), sure(1)), "1 nodes come with 2"),
        (chain(1, 2), (sure(1), sure(3)), "node 1 has token 2"),
        (chain(1), (b"",), "node 0 comes with what is no distribution: 0 bytes"),
        (chain(1), (write(torch.tensor([1, 6]), torch.tensor([0.5, 0.5])),), "outside the voc"),
        (chain(6), (sure(6),), "outside the vocabulary of 6"),
        (chain(1, 2), (sure(1), sure(2)), ""),
        ((), (), ""),
    ],
)
def test_what_cannot_be_verified_by_its_draws_is_refused(
    nodes: tuple[TreeNode, ...], dists: tuple[bytes, ...], why: str
) -> None:
    error = chain_error(nodes, dists, 6)
    assert why in error and bool(why) == bool(error)
    case = Block(nodes, torch.zeros(1 + len(nodes), 6), 1.0, 0, 40, dists)
    if not why:
        assert RULES["sampled"](case)
        return
    with pytest.raises(ValueError, match=why):
        RULES["sampled"](case)


FLAT = torch.zeros(100)  # entropy log 100: .3 / 100 is asked


@pytest.mark.parametrize(
    ("row", "token", "stands"),
    [
        (shares(0.95, 0.05), 0, True),
        (shares(0.95, 0.05), 1, False),
        (shares(0.9, 0.1), 1, True),
        (shares(0.915, 0.085), 1, False),
        (FLAT, 50, True),
        # 99 equal tokens and one with 0.004 or 0.002: about 0.00306 is asked
        (shares(*[0.996 / 99] * 99, 0.004), 99, True),
        (shares(*[0.998 / 99] * 99, 0.002), 99, False),
        # 4 equal tokens and one with .07: .3 * exp(-1.55) = .064 is asked
        (shares(*[0.93 / 4] * 4, 0.07), 4, True),
        (shares(*[0.94 / 4] * 4, 0.06), 4, False),
    ],
)
def test_a_typical_guess_is_likely_for_what_could_come(
    row: Tensor, token: int, stands: bool
) -> None:
    for seed in range(5):
        path, _ = RULES["typical"](block(chain(token), [row, row], seed))
        assert path == ((0,) if stands else ())


def test_the_temperature_counts_for_what_is_typical() -> None:
    row = shares(0.9, 0.1)
    assert RULES["typical"](block(chain(1), [row, row], 0, 1.0))[0] == (0,)
    assert RULES["typical"](block(chain(1), [row, row], 0, 0.8))[0] == ()


@pytest.mark.parametrize(
    ("nodes", "path"),
    [
        # the longest, though its first token is the less likely
        (((-1, 0), (-1, 1), (1, 1)), (1, 2)),
        # of equally long ones the likeliest
        (((-1, 1), (-1, 0)), (1,)),
        (((-1, 0), (0, 1), (0, 0)), (0, 2)),
        # of equally likely ones the first
        (((-1, 0), (-1, 1), (0, 1), (1, 0)), (0, 2)),
        (((-1, 1), (-1, 0), (0, 0), (1, 1)), (0, 2)),
        # nothing stands on what does not
        (((-1, 2), (0, 0), (1, 0), (-1, 1)), (3,)),
    ],
)
def test_the_longest_and_likeliest_typical_path_is_walked(
    nodes: tuple[tuple[int, int], ...], path: tuple[int, ...]
) -> None:
    rows = [shares(0.75, 0.2, 0.05)] * (1 + len(nodes))
    assert RULES["typical"](block([TreeNode(*n) for n in nodes], rows))[0] == path


TARGET = (0.2, 0.3, 0.5)
DRAFT = (0.6, 0.3, 0.1)


def test_a_drafter_that_ranks_by_the_noise_of_match_biases_nothing() -> None:
    row, ones = shares(*TARGET), torch.ones(1, dtype=torch.float64)
    counts: Counter[int] = Counter()
    for seed in range(3000):
        guess = top_perturbed(
            shares(*DRAFT)[None], ones, as_int64([seed]), torch.tensor([40]), 1
        ).tokens
        path, token = RULES["rejection"](block(chain(int(guess)), [row, row], seed))
        counts[int(guess) if path else token] += 1
    for token, prob in enumerate(TARGET):
        assert abs(counts[token] / 3000 - prob) < 4 * math.sqrt(prob * (1 - prob) / 3000)


@pytest.mark.parametrize("name", EVERY)
def test_the_noise_is_not_that_of_match(name: str) -> None:
    flat, same = torch.zeros(1, 10), 0
    for seed in range(1000):
        _, token = RULES[name](Block((), flat, 1.0, seed, 40))
        ones = torch.ones(1, dtype=torch.float64)
        same += token == int(choose(flat, ones, as_int64([seed]), torch.tensor([40])).tokens[0])
    assert 60 < same < 140


def test_the_draws_for_siblings_depths_and_seeds_are_unrelated() -> None:
    def draws(seed: int, depth: int) -> Tensor:
        return torch.tensor(
            Block((), FLAT[None], 1.0, seed, 40).uniforms(depth, 2000), dtype=torch.float64
        )

    base = draws(1, 0)
    assert float(base.min()) > 0 and float(base.max()) < 1
    assert abs(float(base.mean()) - 0.5) < 0.03
    for other in (draws(2, 0), draws(1, 1), base.roll(1)):
        assert abs(float(torch.corrcoef(torch.stack((base, other)))[0, 1])) < 0.1
    assert draws(1, 0).tolist()[:5] == Block((), FLAT[None], 1.0, 1, 40).uniforms(0, 5)


def test_temperature_zero_and_missing_rows_are_bugs() -> None:
    with pytest.raises(AssertionError, match="match"):
        Block((), FLAT[None], 0.0, 0, 0)
    with pytest.raises(AssertionError, match="one row"):
        Block(chain(1), FLAT[None], 1.0, 0, 0)
