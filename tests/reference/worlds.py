"""Toy languages: what follows depends on the last two tokens, so that all outputs can be listed.

A world has a target and a drafter, both random. Proposers guess with the drafter; generating goes
round by round, guesses, decision, commit, until there are three tokens.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from protos.messages import TreeNode
from target_workers.acceptance import depths, walk
from target_workers.model.dist import draw
from target_workers.model.noise import as_int64, gumbel
from target_workers.model.sampling import choose
from target_workers.rules import Block
from tests.reference.rules import softmax

LENGTH = 3  # tokens of an output
START = 17  # position of the first of them
MASK = (1 << 64) - 1
Nodes = tuple[TreeNode, ...]
Tokens = tuple[int, ...]
Guesses = tuple[Nodes, tuple[bytes, ...]]
Decide = Callable[[Block], tuple[tuple[int, ...], int]]


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """Logits by context, one row for each pair of last tokens or lack of one."""

    target: Tensor  # [(vocab + 1) ** 2, vocab] float32
    draft: Tensor
    temperature: float
    known: dict[tuple[int, Nodes], Tensor] = field(default_factory=dict)

    @property
    def vocab(self) -> int:
        return self.target.shape[1]

    def context(self, tokens: Tokens) -> int:
        last = (-1, -1, *tokens)[-2:]
        return (last[0] + 1) * (self.vocab + 1) + last[1] + 1

    def rows(self, prefix: Tokens, nodes: Nodes) -> Tensor:
        """The target's logits after the prefix and after each node: [1 + nodes, vocab]."""
        key = self.context(prefix), nodes
        if key not in self.known:
            self.known[key] = self.target[self.contexts(prefix, nodes)]
        return self.known[key]

    def contexts(self, prefix: Tokens, nodes: Nodes) -> list[int]:
        paths = [prefix]
        for node in nodes:
            paths.append((*paths[1 + node.parent], node.token))
        return [self.context(path) for path in paths]

    def joint(self) -> dict[Tokens, float]:
        """The exact probability of every output."""
        after = [softmax(row, self.temperature) for row in self.target.tolist()]

        def share(tokens: Tokens) -> float:
            steps = (after[self.context(tokens[:i])][tokens[i]] for i in range(LENGTH))
            return float(np.prod(list(steps)))

        return {
            tokens: share(tokens) for tokens in itertools.product(*[range(self.vocab)] * LENGTH)
        }


Propose = Callable[[World, Tokens, int], Guesses]


def make_world(seed: int, vocab: int, *, spread: float, temperature: float, unlike: float) -> World:
    """A drafter that is the target but for noise of size `unlike`; some tokens are impossible."""
    generator = torch.Generator().manual_seed(seed)
    contexts = (vocab + 1) ** 2
    target = torch.randn(contexts, vocab, generator=generator) * spread
    draft = target + torch.randn(contexts, vocab, generator=generator) * unlike
    for logits in (target, draft):
        lost = torch.rand(contexts, vocab, generator=generator) < 0.1
        lost.scatter_(1, logits.argmax(1, keepdim=True), False)
        logits[lost] = -torch.inf
    return World(target * temperature, draft * temperature, temperature)


def seeds(count: int) -> list[int]:
    """Of all sizes: small and consecutive ones, and any 64 bits."""
    large = np.random.default_rng(5).integers(1 << 64, size=count, dtype=np.uint64).tolist()
    return [i if i % 2 else large[i] for i in range(count)]


def generated(world: World, propose: Propose, decide: Decide, seed: int) -> Tokens:
    """One output by a rule that decides blocks."""
    tokens: Tokens = ()
    while len(tokens) < LENGTH:
        nodes, dists = propose(world, tokens, seed)
        rows = world.rows(tokens, nodes)
        block = Block(nodes, rows, world.temperature, seed, START + len(tokens), dists)
        path, next_token = decide(block)
        tokens = (*tokens, *(nodes[i].token for i in path), next_token)
    return tokens[:LENGTH]


def counted(world: World, propose: Propose, decide: Decide, count: int) -> Counter[Tokens]:
    with torch.inference_mode():
        return Counter(generated(world, propose, decide, seed) for seed in seeds(count))


def counted_by_match(
    world: World, propose: Propose, count: int, *, shared_noise: bool = False
) -> Counter[Tokens]:
    """Outputs by rule `match`, all in step; the mistake of `shared_noise`: one position for all."""
    outputs: list[Tokens] = [()] * count
    open_ = list(enumerate(seeds(count)))
    while open_:
        blocks = [propose(world, outputs[i], seed)[0] for i, seed in open_]
        rows, positions = [], []
        for (i, _), nodes in zip(open_, blocks, strict=True):
            rows += world.contexts(outputs[i], nodes)
            start = START + len(outputs[i])
            positions += [start, *(start + 1 + depth for depth in depths(nodes))]
        repeats = torch.tensor([1 + len(nodes) for nodes in blocks])
        chosen = choose(
            world.target[rows],
            torch.full((len(rows),), world.temperature, dtype=torch.float64),
            as_int64(seed for _, seed in open_).repeat_interleave(repeats),
            torch.tensor(positions) * (not shared_noise),
        ).tokens.split(repeats.tolist())
        for (i, _), nodes, tokens in zip(open_, blocks, chosen, strict=True):
            path, next_token = walk(nodes, tokens.tolist())
            outputs[i] = (*outputs[i], *(nodes[j].token for j in path), next_token)
        open_ = [(i, seed) for i, seed in open_ if len(outputs[i]) < LENGTH]
    return Counter(tokens[:LENGTH] for tokens in outputs)


def nothing(world: World, prefix: Tokens, seed: int) -> Guesses:
    return (), ()


def mixed(world: World, prefix: Tokens, seed: int) -> Guesses:
    """Trees of every kind, another one for another seed and position."""
    kind = (seed * 31 + len(prefix)) % 23
    if kind == 0:
        return nothing(world, prefix, seed)
    if kind <= 10:
        return by_noise(world, prefix, seed)
    return _some_tree(world, world.context(prefix), kind), ()


def best_first(world: World, prefix: Tokens, seed: int) -> Guesses:
    """The two best children everywhere, two levels deep."""
    return _best_tree(world, world.context(prefix)), ()


def all_tokens(world: World, prefix: Tokens, seed: int) -> Guesses:
    return tuple(TreeNode(-1, token) for token in range(world.vocab)), ()


def by_noise(world: World, prefix: Tokens, seed: int) -> Guesses:
    """A chain with a sibling at each level, ranked with the noise that rule `match` uses."""
    nodes: list[TreeNode] = []
    path, parent = prefix, -1
    for _ in range(2):
        noise = _noise(seed, START + len(path), world.vocab)
        scores = world.draft[world.context(path)].double() / world.temperature + noise
        first, second = scores.argsort(descending=True)[:2].tolist()
        nodes += [TreeNode(parent, first), TreeNode(parent, second)]
        path, parent = (*path, first), len(nodes) - 2
    return tuple(nodes), ()


def drawn(world: World, prefix: Tokens, seed: int) -> Guesses:
    """A chain drawn from the drafter; its length is fixed before, by the prefix."""
    nodes, dists = [], []
    path = prefix
    for depth in range(1 + world.context(prefix) % 3):
        logits = world.draft[world.context(path)]
        token, dist = draw(logits, world.temperature, seed, START + len(path))
        nodes.append(TreeNode(depth - 1, token))
        dists.append(dist)
        path = (*path, token)
    return tuple(nodes), tuple(dists)


@lru_cache(maxsize=1024)
def _noise(seed: int, position: int, vocab: int) -> Tensor:
    return gumbel(as_int64([seed]), torch.tensor([position]), torch.arange(vocab))


@lru_cache(maxsize=4096)
def _best_tree(world: World, context: int) -> Nodes:
    last = divmod(context, world.vocab + 1)
    prefix = tuple(token - 1 for token in last)
    first = world.draft[context].argsort(descending=True)[:2].tolist()
    nodes = [TreeNode(-1, token) for token in first]
    for i, token in enumerate(first):
        below = world.draft[world.context((*prefix, token))].argsort(descending=True)[:2]
        nodes += [TreeNode(i, child) for child in below.tolist()]
    return tuple(nodes)


@lru_cache(maxsize=4096)
def _some_tree(world: World, context: int, kind: int) -> Nodes:
    """Up to eight nodes under random parents, likely and impossible ones alike."""
    rng = np.random.default_rng((context, kind))
    nodes: list[TreeNode] = []
    for _ in range(rng.integers(1, 9)):
        node = TreeNode(int(rng.integers(-1, len(nodes))), int(rng.integers(world.vocab)))
        if node not in nodes:
            nodes.append(node)
    return tuple(nodes)
