"""What is told of tokens: their log-probabilities, and the best at their place."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protos.sampling import Score
from target_workers.model.sampling import top_tokens


@torch.inference_mode()
def score(logits: Tensor, tokens: Sequence[int], best: int) -> list[Score]:
    """Of the token of each row of logits [n, vocab], with that row's `best` most likely ones.

    What cannot be chosen is in no list. Sums are of float64: a row gives what it gives alone.
    """
    sums = logits.double().logsumexp(-1, keepdim=True)
    own = _told(logits, torch.tensor(tokens)[:, None], sums)
    if best == 0:
        return [Score(logprob) for (logprob,) in own]
    count = min(best, logits.shape[-1])
    ids = top_tokens(logits, torch.ones(len(logits)), count).tokens  # [n, count]
    rows = zip(own, ids.tolist(), _told(logits, ids, sums), strict=True)
    return [_score(*row) for row in rows]


def _score(own: Sequence[float], ids: Sequence[int], values: Sequence[float]) -> Score:
    finite = tuple(value for value in values if value > -math.inf)
    return Score(own[0], tuple(ids[: len(finite)]), finite)


def _told(logits: Tensor, ids: Tensor, sums: Tensor) -> list[list[float]]:
    """Log-probabilities [n, count], rounded to float32."""
    found: list[list[float]] = (logits.gather(-1, ids).double() - sums).float().tolist()
    return found
