"""How well a drafter guesses what a target said, from its choices beside the target's. Pure."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]


def run_lengths(hits: BoolArray, depth: int) -> NDArray[np.int64]:
    """From each place of one text: how many guesses in a row stand, at most `depth`."""
    lengths = np.zeros(len(hits) + 1, np.int64)
    for place in range(len(hits) - 1, -1, -1):
        lengths[place] = lengths[place + 1] + 1 if hits[place] else 0
    return np.minimum(lengths[:-1], depth)


def accepted_length(hits: BoolArray, depth: int) -> float:
    """Tokens per round of drafting chains of `depth` along one text, the target's own included."""
    runs = run_lengths(hits, depth)
    place = rounds = 0
    while place < len(hits):
        place += int(runs[place]) + 1
        rounds += 1
    return len(hits) / rounds if rounds else 1.0


def by_depth(texts: Iterable[BoolArray], depth: int) -> list[float]:
    """The chance that guess d stands given those before it stand, d = 1 .. depth, over texts.

    A guess beyond the end of its text is not counted; nan where no guess was ever tried.
    """
    tried, stood = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
    for hits in texts:
        runs = run_lengths(hits, depth)
        for d in range(min(depth, len(hits))):
            tried[d] += (runs[: len(hits) - d] >= d).sum()
            stood[d] += (runs > d).sum()
    return [int(s) / int(t) if t else float("nan") for s, t in zip(stood, tried, strict=True)]
