"""Rule `rejection`: a guess is a point mass. Exact for every tree, whoever guessed.

At a node its children are tried in order: child x stands with probability target(x); if it does
not, target(x) becomes zero and the rest is renormalised for those that follow.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from target_workers.rules.block import Block


def decide(block: Block) -> tuple[tuple[int, ...], int]:
    """The nodes that stand, in order, and the token after them: -1 if its row is not finite."""
    children: dict[int, list[int]] = {}
    for i, node in enumerate(block.nodes):
        children.setdefault(node.parent, []).append(i)
    path: list[int] = []
    at = -1
    while True:
        left = block.row(at).clone()
        at = _first_that_stands(block, children.get(at, ()), left, len(path))
        if at < 0:
            return tuple(path), block.next_token(len(path), left, block.temperature)
        path.append(at)


def _first_that_stands(block: Block, siblings: Sequence[int], left: Tensor, depth: int) -> int:
    """-1 if none of them does. Those refused are taken out of `left` [vocab], in place."""
    if not siblings or not bool(left.amax().isfinite()):
        return -1
    weights = (left.double() / block.temperature).softmax(0)
    for i, uniform in zip(siblings, block.uniforms(depth, len(siblings)), strict=True):
        token = block.nodes[i].token
        # Summed anew each time: what is left may be tiny. It is never nothing, since a guess that
        # has all of it stands.
        if uniform < float(weights[token] / weights.sum()):
            return i
        weights[token] = 0.0
        left[token] = -math.inf
    return -1
