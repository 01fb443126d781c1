"""What a request asks to be done to its logits before a token is chosen, for many rows at once.

A row gives, bit for bit, what it gives alone: logits are changed one by one, in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from target_workers.model.history import History
from target_workers.model.penalties import Entries
from target_workers.model.truncation import is_limited, limits_of, truncate


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Whose row it is: the committed tokens, then a path of guesses (ids) down to the row."""

    history: History
    path: tuple[int, ...]


Rows = Sequence[tuple[int, Context]]
Places = tuple[Tensor, Tensor]  # rows and ids, one each


@torch.inference_mode()
def process(logits: Tensor, contexts: Sequence[Context | None]) -> None:
    """Change float32 logits [n, vocab] on the CPU, in place; None leaves a row alone.

    So are rows left whose logits are not finite, for whoever chooses a token to report.
    """
    asked = [(row, context) for row, context in enumerate(contexts) if context is not None]
    if not asked:
        return
    is_finite = logits.amax(-1).isfinite().tolist()
    rows = [(row, context) for row, context in asked if is_finite[row]]
    _penalise(logits, rows)
    _mask(logits, rows)
    _truncate(logits, rows)


def _penalise(logits: Tensor, rows: Rows) -> None:
    some = [(row, asked, c.path) for row, c in rows if (asked := c.history.penalties) is not None]
    if not some:
        return
    committed = _penalised(logits, [(row, asked.entries) for row, asked, _ in some])
    guessed = _penalised(logits, [(row, asked.after(path)) for row, asked, path in some])
    for places, values in (committed, guessed):  # of a token in both the latter counts
        logits[places] = values


def _penalised(logits: Tensor, entries: Sequence[tuple[int, Entries]]) -> tuple[Places, Tensor]:
    """Where logits [n, vocab] change, and to what; those that are finite stay so."""
    places = _places([(row, ids) for row, (ids, _) in entries])
    effects = np.concatenate([effects for _, (_, effects) in entries], 1)
    divisor, presence, frequency, bias = torch.from_numpy(effects)
    before = logits[places]
    values = before.double()
    values = torch.where(values > 0, values / divisor, values * divisor)
    values = values - presence - frequency + bias
    most = torch.finfo(logits.dtype).max
    after = values.clamp(-most, most).to(logits.dtype)
    return places, torch.where(before.isfinite(), after, before)


def _mask(logits: Tensor, rows: Rows) -> None:
    _keep_allowed(logits, rows)
    excluded = [(row, context.history.excluded(context.path)) for row, context in rows]
    logits[_places(excluded)] = -math.inf
    for row, context in rows:
        matcher = context.history.matcher
        if matcher is not None:
            is_out = torch.from_numpy(~matcher.allowed(context.path))
            logits[row, : len(is_out)].masked_fill_(is_out, -math.inf)


def _keep_allowed(logits: Tensor, rows: Rows) -> None:
    some = [(row, ids) for row, c in rows if (ids := c.history.allowed) is not None]
    places = _places(some)
    kept = logits[places]
    logits[[row for row, _ in some]] = -math.inf
    logits[places] = kept


def _truncate(logits: Tensor, rows: Rows) -> None:
    samplings = {row: context.history.sampling for row, context in rows}
    limited = [row for row, sampling in samplings.items() if is_limited(sampling)]
    if not limited:
        return
    limits = limits_of([samplings[row] for row in limited], logits.shape[-1])
    if len(limited) == len(logits):
        truncate(logits, limits)
        return
    some = logits[limited]
    truncate(some, limits)
    logits[limited] = some


def _places(lists: Sequence[tuple[int, NDArray[np.int64]]]) -> Places:
    """The places of lists of ids, each of one row."""
    rows = [np.full(len(ids), row, np.int64) for row, ids in lists]
    none = np.empty(0, np.int64)
    ids = np.concatenate([none, *(ids for _, ids in lists)])
    return torch.from_numpy(np.concatenate([none, *rows])), torch.from_numpy(ids)
