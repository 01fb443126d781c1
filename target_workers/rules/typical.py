"""Rule `typical` (Cai et al. 2024, Medusa): a guess stands if it is likely enough. Not exact.

Guess x stands if target(x) > min(EPSILON, DELTA * exp(-H)), H being the entropy of target: where
many tokens would do, less is asked of one. The longest path that stands is walked, of equally long
ones the likeliest, of equally likely ones the first.
"""

import math

import torch
from torch import Tensor

from target_workers.rules.block import Block

EPSILON = 0.09
DELTA = 0.3


def decide(block: Block) -> tuple[tuple[int, ...], int]:
    """The nodes that stand, in order, and the token after them: -1 if its row is not finite."""
    logs = {-1: 0.0}  # of how likely the path to a node that stands is
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    likely: dict[int, Tensor] = {}
    for i, node in enumerate(block.nodes):
        parent = node.parent
        if parent not in paths:
            continue
        if parent not in likely:
            likely[parent] = _likely_enough(block.target(parent))
        share = float(likely[parent][node.token])
        if share > 0:
            paths[i] = (*paths[parent], i)
            logs[i] = logs[parent] + math.log(share)
    end = max(paths, key=lambda i: (len(paths[i]), logs[i]))
    depth = len(paths[end])
    return paths[end], block.next_token(depth, block.row(end), block.temperature)


def _likely_enough(target: Tensor) -> Tensor:
    """target(x) where it suffices, else 0, as it is everywhere if target is NaN: [vocab]."""
    entropy = torch.special.entr(target).sum()
    enough = (DELTA * torch.exp(-entropy)).clamp(max=EPSILON)
    return torch.where(target > enough, target, 0.0)
