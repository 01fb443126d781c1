"""The margin oracle: where bits may differ, outputs are equal until a choice was a near tie."""

from collections.abc import Sequence

import torch

from protos.sampling import Sampling
from target_workers.model.decoder import Decoder
from target_workers.model.noise import as_int64, gumbel
from tests.tiny_engines import prefill

# In bf16 one row and 64 rows through the same kernels already move the lead of a token by up to 0.4
# (the small model on prose, 300 positions), and flip one choice in fifty.
MARGINS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.5}


def compared(
    decoder: Decoder,
    prompt: Sequence[int],
    sampling: Sampling,
    expected: Sequence[int],
    got: Sequence[int],
) -> int:
    """How many tokens are equal; asserts that the first other one was a near tie to `decoder`."""
    assert len(expected) == len(got)
    for i, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one != other:
            gap = lead(decoder, [*prompt, *expected[:i]], sampling)
            margin = MARGINS[decoder.dtype]
            assert gap < margin, f"token {i} is {other}, not {one}, by {gap:.2g}"
            return i
    return len(expected)


def lead(decoder: Decoder, tokens: Sequence[int], sampling: Sampling) -> float:
    """By how much the token after these is ahead of the next best, in the scores it is drawn by."""
    scores = prefill(decoder, tokens)[1][-1].double()
    if sampling.temperature:
        seed, position = as_int64([sampling.seed]), torch.tensor([len(tokens)])
        noise = gumbel(seed, position, torch.arange(len(scores)))
        scores = scores / sampling.temperature + noise
    best = scores.topk(2).values
    return float(best[0] - best[1])
