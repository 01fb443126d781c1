"""Only the best tokens of a row stay: top_k, top_p and min_p.

All three keep the m best, of equals the lowest ids: they differ in m. The best few hundred tokens
nearly always tell it, so a whole row is sorted only where they do not.

What a row gives is computed in float64 by NumPy: torch splits sums and loops by batch and threads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.sampling import Sampling

LEADERS = 256  # tokens looked at first
MORE = 4096  # and where they do not tell

Rows = NDArray[np.float32]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What stays of each row, as arrays [n]; a `top_k` of `vocab` is off."""

    vocab: int
    temperature: Floats  # above 0
    top_k: Counts
    top_p: Floats
    log_min_p: Floats

    def of(self, rows: slice) -> "Limits":
        """Those of some rows."""
        return Limits(
            self.vocab,
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.log_min_p[rows],
        )


def is_limited(sampling: Sampling) -> bool:
    """Whether anything is cut off; greedy rows keep their best token whatever is asked."""
    asked = sampling.processors
    return sampling.temperature > 0 and (asked.top_k > 0 or asked.top_p < 1 or asked.min_p > 0)


def limits_of(samplings: Sequence[Sampling], vocab: int) -> Limits:
    """The limits of rows [n, vocab]."""
    asked = [sampling.processors for sampling in samplings]
    return Limits(
        vocab,
        np.array([sampling.temperature for sampling in samplings], np.float64),
        np.array([min(one.top_k or vocab, vocab) for one in asked], np.int64),
        np.array([one.top_p for one in asked], np.float64),
        np.array([math.log(one.min_p) if one.min_p > 0 else -math.inf for one in asked]),
    )


def truncate(logits: Tensor, limits: Limits) -> None:
    """Set what does not stay to -inf, in place. Rows [n, vocab] may be masked, even wholly."""
    rows = logits.numpy()
    best = logits.topk(min(LEADERS + 1, limits.vocab)).values.numpy()
    totals = _totals(rows, best[:, 0], limits)
    kept = _kept(best, totals, limits)
    worst, is_split = _edges(best, kept)
    for row in np.flatnonzero(kept == 0):
        one = slice(row, row + 1)
        more, kept[one] = _look_further(rows[row], totals[one], limits.of(one))
        worst[one], is_split[one] = _edges(more, kept[one])
    logits.masked_fill_(logits < torch.from_numpy(worst)[:, None], -math.inf)
    for row in np.flatnonzero(is_split):
        equals = np.flatnonzero(rows[row] == worst[row])
        better = np.count_nonzero(rows[row] > worst[row])
        rows[row, equals[kept[row] - better :]] = -math.inf


def _look_further(row: Rows, total: Floats, limits: Limits) -> tuple[Rows, Counts]:
    """As many of the best values of a row [vocab] as it takes, in order, and how many stay."""
    if limits.vocab > MORE:
        best = -np.sort(-np.partition(row, -MORE)[None, -MORE:])
        kept = _kept(best, total, limits)
        if kept[0] > 0:
            return best, kept
    best = -np.sort(-row[None])
    return best, _kept(best, total, limits)


def _totals(rows: Rows, best: Rows, limits: Limits) -> Floats:
    """The weight of each whole row where top_p goes by it, else NaN; the best token weighs 1."""
    totals = np.full(len(rows), math.nan)
    asked = (limits.top_p < 1) & (limits.top_k == limits.vocab)
    for row in np.flatnonzero(asked & (best > -math.inf)):
        below = rows[row].astype(np.float64) - float(best[row])
        totals[row] = np.exp(below / limits.temperature[row]).sum()
    return totals


@np.errstate(invalid="ignore")  # a row that is wholly masked: nothing comes of it
def _kept(best: Rows, totals: Floats, limits: Limits) -> Counts:
    """How many stay, from the `best` values [n, m] in descending order; 0 where m do not tell."""
    width = best.shape[1]
    scaled = (best.astype(np.float64) - best[:, :1]) / limits.temperature[:, None]
    sums = np.exp(scaled).cumsum(1)
    last = np.minimum(limits.top_k, width) - 1
    of_top_k = np.take_along_axis(sums, last[:, None], 1)[:, 0]
    shares = sums / np.where(np.isnan(totals), of_top_k, totals)[:, None]
    by_share = np.where(limits.top_p < 1, (shares < limits.top_p[:, None]).sum(1) + 1, limits.top_k)
    by_floor = (scaled >= limits.log_min_p[:, None]).sum(1)
    kept = np.minimum(limits.top_k, np.minimum(by_share, by_floor)).clip(1)
    is_told = (kept < width) & ((limits.top_k < width) | (limits.top_k == limits.vocab))
    return np.where(is_told | (width == limits.vocab), kept, 0)


def _edges(best: Rows, kept: Counts) -> tuple[Rows, Flags]:
    """The worst value that stays of each row, and whether an equal one does not."""
    width = best.shape[1]
    worst = np.take_along_axis(best, kept[:, None] - 1, 1)[:, 0]
    after = np.take_along_axis(best, np.minimum(kept, width - 1)[:, None], 1)[:, 0]
    return worst, (kept < width) & (after == worst) & (worst > -math.inf)
