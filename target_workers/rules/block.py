"""What a rule is given and what it draws by. The noise is no drafter's and not that of `match`.

A drafter may rank its guesses by the noise of `match`; a rule that drew by it too would be biased
by what was guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protos.messages import TreeNode
from target_workers.model.noise import (
    ACCEPTING,
    FINISHING,
    as_int64,
    hashes,
    row_keys,
    seeds_for,
    uniform_of,
)
from target_workers.model.sampling import choose


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Guesses under a root and the target's processed logits: row 0 after the root, 1 + i after i.

    `logits` is float32 [1 + nodes, vocab]; `start` is the position of the token drawn at row 0.
    `dists` has what each node was drawn from, under rule `sampled` only.
    """

    nodes: Sequence[TreeNode]
    logits: Tensor
    temperature: float
    seed: int
    start: int
    dists: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        assert self.temperature > 0, "at temperature 0 every rule is `match`"
        assert len(self.logits) == 1 + len(self.nodes), "one row per node and one for the root"

    def row(self, at: int) -> Tensor:
        """The logits after node `at`, -1 being the root: [vocab]."""
        return self.logits[1 + at]

    def target(self, at: int) -> Tensor:
        """target(x) after node `at`: float64 [vocab], NaN where the logits are not finite."""
        return (self.row(at).double() / self.temperature).softmax(0)

    def uniforms(self, depth: int, count: int) -> list[float]:
        """Draws from (0, 1) for the first `count` siblings at a depth below the root."""
        seeds = seeds_for(ACCEPTING, as_int64([self.seed]))
        keys = row_keys(seeds, torch.tensor(self.start + depth))
        drawn: list[float] = uniform_of(hashes(keys, torch.arange(count))).tolist()
        return drawn

    def next_token(self, depth: int, logits: Tensor, temperature: float) -> int:
        """A token from the softmax of `logits` [vocab] at a depth; -1 if they are not finite."""
        choice = choose(
            logits[None],
            torch.tensor([temperature], dtype=torch.float64),
            seeds_for(FINISHING, as_int64([self.seed])),
            torch.tensor([self.start + depth]),
        )
        return int(choice.tokens[0])
