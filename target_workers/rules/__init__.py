"""Every rule but `match` by its name: which guesses of a block stand, and the token after them."""

from collections.abc import Callable

from target_workers.rules import rejection, sampled, typical
from target_workers.rules.block import Block

__all__ = ["RULES", "Block"]

RULES: dict[str, Callable[[Block], tuple[tuple[int, ...], int]]] = {
    "rejection": rejection.decide,
    "sampled": sampled.decide,
    "typical": typical.decide,
}
