"""Rule `sampled` (Leviathan et al. 2023, Chen et al. 2023): one chain, each guess drawn by chance.

Guess x stands with probability min(1, target(x) / draft(x)); if it does not, the token in its place
is drawn from max(0, target - draft). Exact only where draft is what x was drawn from, and where the
length of the chain was fixed before its tokens were drawn.
"""

from collections.abc import Sequence

from torch import Tensor

from protos.messages import TreeNode
from target_workers.model.dist import read
from target_workers.rules.block import Block


def chain_error(nodes: Sequence[TreeNode], dists: Sequence[bytes], vocab_size: int) -> str:
    """Why these guesses cannot be verified under this rule, or nothing if they can."""
    if any(node.parent != i - 1 for i, node in enumerate(nodes)):
        return "under rule sampled the nodes must be one chain"
    if len(dists) != len(nodes):
        return f"{len(nodes)} nodes come with {len(dists)} distributions, each needs its own"
    found = (_error(node.token, dist, vocab_size) for node, dist in zip(nodes, dists, strict=True))
    return next((f"node {i} {error}" for i, error in enumerate(found) if error), "")


def decide(block: Block) -> tuple[tuple[int, ...], int]:
    """The nodes that stand, in order, and the token after them: -1 if its row is not finite.

    Raises ValueError with what `chain_error` says of the block.
    """
    if error := chain_error(block.nodes, block.dists, block.logits.shape[-1]):
        raise ValueError(error)
    for i, (node, dist) in enumerate(zip(block.nodes, block.dists, strict=True)):
        target = block.target(i - 1)
        if bool(target[0].isnan()):
            return tuple(range(i)), -1
        ids, draft = read(dist)
        chance = float(target[node.token] / draft[ids == node.token])
        if block.uniforms(i, 1)[0] >= chance:
            left = _residual(target, ids, draft)
            return tuple(range(i)), block.next_token(i, left.log(), 1.0)
    count = len(block.nodes)
    last = block.row(count - 1)
    return tuple(range(count)), block.next_token(count, last, block.temperature)


def _residual(target: Tensor, ids: Tensor, draft: Tensor) -> Tensor:
    """max(0, target - draft) [vocab], or target where rounding leaves nothing of it."""
    left = target.clone()
    left[ids] = (target[ids] - draft).clamp_(min=0)
    return left if bool(left.any()) else target


def _error(token: int, dist: bytes, vocab_size: int) -> str:
    try:
        ids, _ = read(dist)
    except ValueError as error:
        return f"comes with what is no distribution: {error}"
    if int(ids[-1]) >= vocab_size:
        return f"was drawn from tokens outside the vocabulary of {vocab_size}"
    if not bool((ids == token).any()):
        return f"has token {token}, which its own distribution cannot give"
    return ""
