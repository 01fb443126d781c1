"""What a drafter draws a guess from under rule `sampled`, as it travels beside the guess.

The distribution is the truncated float32 one that is sent, not the one it was made of: the target
must weigh a guess by exactly what it was drawn from.
"""

import numpy as np
import torch
from torch import Tensor

from target_workers.model.noise import DRAFTING, as_int64, gumbel, seeds_for
from target_workers.model.sampling import top_tokens

SUPPORT = 64  # tokens at most
ENTRY_BYTES = 8  # an int32 id, a float32 probability
ROUNDING = 1e-3  # how far from 1 probabilities may sum to
SMALLEST = torch.finfo(torch.float32).tiny  # below, some processors make it zero


@torch.inference_mode()
def draw(logits: Tensor, temperature: float, seed: int, position: int) -> tuple[int, bytes]:
    """A token from the softmax of float32 logits [vocab] over its best tokens, and that softmax.

    `position` is that of the token. Raises ValueError if the logits are not finite.
    """
    assert temperature > 0, "at temperature 0 nothing is drawn"
    if not bool(logits.amax().isfinite()):
        raise ValueError(f"nothing can be drawn at position {position}: the logits are not finite")
    count = min(SUPPORT, len(logits))
    temperatures = torch.tensor([temperature], dtype=torch.float64)
    ids = top_tokens(logits[None], temperatures, count).tokens[0].sort().values
    probs = (logits[ids].double() / temperature).softmax(0).float()
    ids, probs = ids[probs >= SMALLEST], probs[probs >= SMALLEST]
    seeds = seeds_for(DRAFTING, as_int64([seed]))
    scores = probs.double().log() + gumbel(seeds, torch.tensor(position), ids)
    return int(ids[scores.argmax()]), write(ids, probs)


def write(ids: Tensor, probs: Tensor) -> bytes:
    """Rising ids and their probabilities as bytes: all ids as int32, then all float32."""
    return ids.numpy().astype("<i4").tobytes() + probs.numpy().astype("<f4").tobytes()


def read(dist: bytes) -> tuple[Tensor, Tensor]:
    """Rising ids int64 and probabilities float64 that sum to 1, each [n].

    Raises ValueError if the bytes are no distribution over 1 to SUPPORT tokens.
    """
    count, rest = divmod(len(dist), ENTRY_BYTES)
    if rest or not 1 <= count <= SUPPORT:
        raise ValueError(f"{len(dist)} bytes do not hold 1 to {SUPPORT} tokens")
    ids = np.frombuffer(dist, "<i4", count).astype(np.int64)
    probs = np.frombuffer(dist, "<f4", offset=4 * count).astype(np.float64)
    if ids[0] < 0 or not (np.diff(ids) > 0).all():
        raise ValueError("its token ids do not rise from 0 on")
    total = probs.sum()
    if not (probs > 0).all() or not abs(total - 1) <= ROUNDING:
        raise ValueError("its probabilities are not positive or do not sum to 1")
    return torch.from_numpy(ids), torch.from_numpy(probs / total)
