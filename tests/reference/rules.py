"""What the verification rules mean: by exact probabilities of everything a block can lead to.

`targets[0]` is target(x) after the root, `targets[1 + i]` after node i; `drafts[i]` is draft(x)
that node i was drawn from. An outcome is a walk (indices of nodes) and the token after it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from protos.messages import TreeNode

Probs = NDArray[np.float64]  # [vocab]
T = TypeVar("T")
Outcome = tuple[tuple[int, ...], int]
LEAST_EXPECTED = 5.0  # outcomes expected more rarely are counted together
DOUBT = 1e-4


def softmax(logits: Sequence[float], temperature: float) -> Probs:
    scaled = np.array(logits, np.float64) / temperature
    odds = np.exp(scaled - scaled.max())
    return odds / odds.sum()


def match(nodes: Sequence[TreeNode], targets: Sequence[Probs]) -> dict[Outcome, float]:
    """The target draws a token after the root, after the node that is that token, and so on."""
    found: Counter[Outcome] = Counter()

    def draw(walk: tuple[int, ...], stands: float) -> None:
        at = walk[-1] if walk else -1
        children = {node.token: i for i, node in enumerate(nodes) if node.parent == at}
        for token, share in enumerate(targets[1 + at]):
            if token in children:
                draw((*walk, children[token]), stands * share)
            else:
                found[walk, token] += stands * share

    draw((), 1.0)
    return _possible(found)


def rejection(nodes: Sequence[TreeNode], targets: Sequence[Probs]) -> dict[Outcome, float]:
    """The children one after the other: each with its share of what those before it left."""
    found: Counter[Outcome] = Counter()

    def verify(walk: tuple[int, ...], stands: float) -> None:
        at = walk[-1] if walk else -1
        left = targets[1 + at].copy()
        for i, node in enumerate(nodes):
            if node.parent != at:
                continue
            verify((*walk, i), stands * left[node.token])
            stands *= 1 - left[node.token]
            left[node.token] = 0.0
            if left.sum() <= 0:
                return
            left /= left.sum()
        for token, share in enumerate(left):
            found[walk, token] += stands * share

    verify((), 1.0)
    return _possible(found)


def sampled(
    nodes: Sequence[TreeNode], targets: Sequence[Probs], drafts: Sequence[Probs]
) -> dict[Outcome, float]:
    """A chain: a guess stands with target(x) / draft(x), else a token of what draft lacks."""
    found: Counter[Outcome] = Counter()
    stands = 1.0
    for i, node in enumerate(nodes):
        target, draft = targets[i], drafts[i]
        accepted = min(1.0, target[node.token] / draft[node.token])
        left = np.maximum(0.0, target - draft)
        if accepted < 1:
            for token, share in enumerate(left / left.sum()):
                found[tuple(range(i)), token] += stands * (1 - accepted) * share
        stands *= accepted
    for token, share in enumerate(targets[-1]):
        found[tuple(range(len(nodes))), token] += stands * share
    return _possible(found)


def _possible(found: Mapping[Outcome, float]) -> dict[Outcome, float]:
    return {outcome: float(share) for outcome, share in found.items() if share > 0}


@dataclass(frozen=True, slots=True)
class Fit:
    """How well counts agree with exact probabilities.

    `p_value` is that of the chi-square statistic, 0 if something impossible was seen; `distance`
    is the total variation, and `expected` about what it is of perfect samples.
    """

    p_value: float
    distance: float
    expected: float

    @property
    def is_good(self) -> bool:
        return self.p_value > DOUBT


def fit(counts: Mapping[T, int], probs: Mapping[T, float]) -> Fit:
    """Holds so many of each outcome against their probabilities."""
    total = sum(counts.values())
    expected = np.array([probs[outcome] for outcome in probs]) * total
    seen = np.array([counts.get(outcome, 0) for outcome in probs], np.float64)
    assert abs(expected.sum() / total - 1) < 1e-9, "these are all outcomes"
    shares = expected / total
    noise = float(np.sqrt(2 * shares * (1 - shares) / (np.pi * total)).sum() / 2)
    distance = float(np.abs(seen - expected).sum() + total - seen.sum()) / (2 * total)
    if seen.sum() < total:
        return Fit(0.0, distance, noise)
    common = expected >= LEAST_EXPECTED
    seen = np.append(seen[common], seen[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return Fit(chi_square_tail(statistic, len(seen) - 1), distance, noise)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The probability of at least so large a statistic."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def is_typical(target: Probs, token: int) -> bool:
    """Medusa's bound: likely enough, or likely enough for how much is open."""
    shares = target[target > 0]
    entropy = -float((shares * np.log(shares)).sum())
    return bool(target[token] > min(0.09, 0.3 * np.exp(-entropy)))


def longest_typical(nodes: Sequence[TreeNode], targets: Sequence[Probs]) -> int:
    """The length of the longest walk on which every guess is typical."""
    lengths = {-1: 0}
    for i, node in enumerate(nodes):
        if node.parent in lengths and is_typical(targets[1 + node.parent], node.token):
            lengths[i] = lengths[node.parent] + 1
    return max(lengths.values())
