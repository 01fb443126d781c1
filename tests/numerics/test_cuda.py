"""The same numbers on CUDA as on the CPU, as near as its kernels allow. Not yet run on a GPU.

On a machine with one: `pytest -m gpu tests/numerics/test_cuda.py`. FlashInfer compiles its kernels
when they are first used, which takes most of the time.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from target_workers.model.attention import TorchAttention
from target_workers.model.attention_choice import find_library
from target_workers.model.config import ModelError
from target_workers.model.decoder import TorchDecoder
from target_workers.model.flashinfer import Kit, PagedAttention
from target_workers.model.loading import load_decoder, load_reference
from tests.numerics.scenes import (
    SCENES,
    Forwards,
    attending,
    leaving,
    new_cache,
    of_many,
    setting_of,
    short_then_long,
    states_of,
)
from tests.tiny import make_tiny

FLOAT32_TOLERANCE = 1e-3
# As parts of the length of all hidden states: rounding leaves about a quarter of it.
TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.006}
SMALL_MODEL_TOLERANCE = 0.1  # 30 layers
WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
MODELS = {
    "bf16": (torch.bfloat16, "Llama", {}),
    "fp16, window in some layers": (torch.float16, "Qwen3", WINDOW),
}


def gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test for machines with a GPU."""
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    marked: Callable[..., Any] = pytest.mark.gpu(pytest.mark.timeout(170)(missing(test)))
    return marked


needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None,
    reason="needs FlashInfer (pip install 'paceline[cuda]')",
)


@dataclass(frozen=True)
class Subject:
    """One model on the GPU, as it is served and in other ways, and on the CPU."""

    served: TorchDecoder
    eager: TorchDecoder
    torch: TorchDecoder
    cpu: TorchDecoder

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.cpu.dtype]


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    dtype, family, overrides = MODELS[request.param]
    folder = make_tiny(tmp_path_factory.mktemp("cuda"), 1, family, head_dim=64, **overrides)
    return _subject(folder, dtype)


def _subject(folder: Path, dtype: torch.dtype) -> Subject:
    served = load_decoder(folder, dtype=dtype, device="cuda")
    assert isinstance(served, TorchDecoder)
    setting = setting_of(served)
    return Subject(
        served,
        attending(served, PagedAttention(setting, Kit(find_library()))),
        attending(served, TorchAttention(setting)),
        load_reference(folder, dtype=dtype),
    )


def off(got: Tensor, expected: Tensor) -> float:
    """How long the difference is, as a part of what was expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@gpu
def test_float32_gives_the_states_of_the_cpu(tiny_llama: Path) -> None:
    decoder = load_decoder(tiny_llama, dtype=torch.float32, device="cuda")
    assert isinstance(decoder, TorchDecoder)
    reference = load_reference(tiny_llama, dtype=torch.float32)
    for forwards in SCENES.values():
        difference = states_of(decoder, forwards) - states_of(reference, forwards)
        assert difference.abs().max() <= FLOAT32_TOLERANCE
    assert decoder.attention(torch.float32).name == "torch"


@gpu
def test_logits_come_back_to_the_cpu(tiny_llama: Path) -> None:
    decoder = load_decoder(tiny_llama, dtype=torch.float32, device="cuda")
    logits = decoder.logits(torch.ones(3, decoder.config.hidden_size, device="cuda"))
    assert logits.device.type == "cpu" and logits.dtype is torch.float32


@needs_flashinfer
@gpu
def test_flashinfer_is_chosen(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    dtype = subject.cpu.dtype
    assert subject.served.attention(dtype).name == "flashinfer", caplog.text
    assert subject.served.attention(torch.int8).name == "torch"


@needs_flashinfer
@gpu
@pytest.mark.parametrize("scene", SCENES)
def test_flashinfer_gives_the_states_of_torch(subject: Subject, scene: str) -> None:
    states = states_of(subject.eager, SCENES[scene])
    assert off(states, states_of(subject.torch, SCENES[scene])) <= subject.tolerance
    assert off(states, states_of(subject.cpu, SCENES[scene])) <= subject.tolerance


@needs_flashinfer
@gpu
@pytest.mark.parametrize(
    ("forwards", "sizes"),
    [
        (of_many(1, 4), (1,)),
        (of_many(11, 3), (16,)),
        (of_many(150, 3, longest=8), (256,)),
        (leaving(), (1, 2, 4, 8)),
        (short_then_long(), (4,)),
        (SCENES["rows that see each other"], (4,)),
    ],
)
def test_graphs_give_the_states_of_eager_forwards(
    subject: Subject,
    forwards: Forwards,
    sizes: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = new_cache(subject.served)
    states = states_of(subject.served, forwards, cache)
    assert off(states, states_of(subject.eager, forwards)) <= subject.tolerance
    graphs = subject.served.graphs(cache)
    assert graphs is not None and set(graphs.captured) >= {*sizes}, caplog.text


@needs_flashinfer
@gpu
def test_graphs_leave_the_cache_of_eager_forwards(subject: Subject) -> None:
    cache, eager = new_cache(subject.served), new_cache(subject.eager)
    states_of(subject.served, leaving(), cache)
    states_of(subject.eager, leaving(), eager)
    for layer in range(subject.served.config.num_layers):
        held, expected = cache.layer(layer), eager.layer(layer)
        assert off(held, expected) <= subject.tolerance
        # Nothing that fills up a graph is written to a slot of no sequence.
        assert torch.equal(held.flatten(1).any(1), expected.flatten(1).any(1))


@needs_flashinfer
@gpu
@pytest.mark.model
def test_the_small_model_has_the_states_of_the_cpu(small_model: Path) -> None:
    subject = _subject(small_model, torch.bfloat16)
    for forwards in (SCENES["all at once"], leaving()):
        expected = states_of(subject.cpu, forwards)
        assert off(states_of(subject.served, forwards), expected) <= SMALL_MODEL_TOLERANCE
        assert off(states_of(subject.torch, forwards), expected) <= SMALL_MODEL_TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_named(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="no CUDA device"):
        load_decoder(tiny_llama, dtype=torch.float32, device="cuda")
