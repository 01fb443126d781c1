"""The same numbers on CUDA as on the CPU, as near as its kernels allow. Not yet run on a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from target_workers.model.batch import build_batch
from target_workers.model.config import ModelError
from target_workers.model.exact import ExactModeError
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import load_decoder
from target_workers.model.run import Run

TOLERANCE = 1e-3


def logits(folder: Path, device: str) -> torch.Tensor:
    decoder = load_decoder(folder, dtype=torch.float32, exact=False, device=device)
    cache = KVCache(decoder.config, 256, decoder.dtype, device)
    tokens = np.arange(3, 103)
    first = Run(tokens[:60], 0, np.arange(60), np.arange(0))
    second = Run(tokens[60:], 60, np.arange(60, 100), np.arange(60))
    for run in (first, second):
        hidden = decoder.hidden(build_batch([run]), cache)
    return decoder.logits(hidden)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_logits_of_the_cpu(tiny_llama: Path) -> None:
    difference = (logits(tiny_llama, "cuda") - logits(tiny_llama, "cpu")).abs().max()
    assert difference <= TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_named(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="no CUDA device"):
        load_decoder(tiny_llama, dtype=torch.float32, exact=False, device="cuda")


def test_exact_mode_on_cuda_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ExactModeError, match="CPU"):
        load_decoder(tiny_llama, dtype=torch.float32, exact=True, device="cuda")
