"""The decoder computes what transformers computes, however a sequence is cut up."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from target_workers.model.config import ModelConfig
from target_workers.model.decoder import Decoder
from target_workers.model.loading import load_decoder, load_reference
from target_workers.model.run import IntArray
from tests.numerics.forward import (
    Path,
    in_chunks,
    node_paths,
    random_parents,
    random_sizes,
    random_tokens,
    tree_logits,
)
from tests.tiny import make_tiny

LOADERS = [load_decoder, load_reference]
TOLERANCE = 1e-4
SMALL_TOLERANCE = 2e-3
CLEAR_MARGIN = 1e-2

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama untied": ("Llama", {"tie_word_embeddings": False}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without groups": ("Llama", {"num_key_value_heads": 4}),
    "llama with one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "yarn rope": ("Llama", {"rope_parameters": YARN}),
    "yarn, no rounding": ("Llama", {"rope_parameters": {**YARN, "truncate": False}}),
    "yarn, own scale": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 0.9}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral, window of 24": ("Mistral", {"sliding_window": 24}),
    "mistral, window of 200": ("Mistral", {"sliding_window": 200}),
    "mistral, window of 1": ("Mistral", {"sliding_window": 1}),
    "qwen2, windows from layer 1": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3, windows in layers 0 and 2": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 40,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
CUT_UP = ("llama", "mistral, window of 24", "qwen3, windows in layers 0 and 2")


def reference_logits(folder: FilePath, tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = model(tokens[None]).logits[0]
    return logits


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max())


@pytest.mark.parametrize("load", LOADERS, ids=["kernels", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_one_shot_logits_are_those_of_transformers(
    name: str, load: Callable[..., Decoder], tmp_path: FilePath
) -> None:
    family, overrides = MODELS[name]
    folder = make_tiny(tmp_path, 3, family, **overrides)
    decoder = load(folder, dtype=torch.float32)
    tokens = random_tokens(300, seed=1)
    expected = reference_logits(folder, torch.from_numpy(tokens))
    assert difference(in_chunks(decoder, Path(tokens, 2), []), expected) <= TOLERANCE
    assert expected.std() > 0.3, "the tiny model is degenerate"


@dataclass(frozen=True)
class Subject:
    """A loaded model and the folder it is from."""

    decoder: Decoder
    folder: FilePath

    def reference(self, tokens: IntArray) -> Tensor:
        return reference_logits(self.folder, torch.from_numpy(tokens))


@pytest.fixture(scope="module", params=CUT_UP)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    family, overrides = MODELS[request.param]
    return make_tiny(tmp_path_factory.mktemp("cut"), 1, family, **overrides)


@pytest.fixture(scope="module", params=LOADERS, ids=["kernels", "torch"])
def subject(request: pytest.FixtureRequest, folder: FilePath) -> Subject:
    return Subject(request.param(folder, dtype=torch.float32), folder)


def test_token_by_token_logits_are_those_of_transformers(subject: Subject) -> None:
    tokens = random_tokens(150, seed=4)
    expected = subject.reference(tokens)
    assert difference(in_chunks(subject.decoder, Path(tokens, 5), [1] * 150), expected) <= TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_random_chunks_give_the_logits_of_transformers(subject: Subject, seed: int) -> None:
    tokens = random_tokens(700, seed)
    chunks = in_chunks(subject.decoder, Path(tokens, seed), random_sizes(700, seed))
    assert difference(chunks, subject.reference(tokens)) <= TOLERANCE


@pytest.mark.parametrize("context", [1, 30, 508])
def test_every_tree_node_gets_the_logits_of_its_path(subject: Subject, context: int) -> None:
    path = Path(random_tokens(context, context), 1)
    tokens, parents = random_tokens(12, seed=9), random_parents(12, seed=context)
    _, logits = tree_logits(subject.decoder, path, tokens, parents)
    for node, alone in enumerate(node_paths(path, tokens, parents)):
        assert difference(logits[node], subject.reference(alone.tokens)[-1]) <= TOLERANCE


def test_a_window_hides_what_is_before_it(folder: FilePath) -> None:
    decoder = load_decoder(folder, dtype=torch.float32)
    tokens = random_tokens(300, seed=6)
    changed = tokens.copy()
    changed[0] = (changed[0] + 1) % 512
    before, after = (in_chunks(decoder, Path(each, 5), []) for each in (tokens, changed))
    # Through two layers a token is seen within two windows.
    hidden = bool(decoder.config.windows) and all(decoder.config.windows)
    assert torch.equal(before[47:], after[47:]) == hidden
    assert not torch.equal(before[46], after[46])


def test_both_spellings_of_rope_mean_the_same(tmp_path: FilePath) -> None:
    folder = make_tiny(tmp_path, 3, "Llama", rope_parameters=LLAMA3)
    new = ModelConfig.from_folder(folder)
    raw = json.loads((folder / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    assert ModelConfig.from_json(raw) == new
    assert new.rope.kind == "llama3"


@pytest.mark.model
@pytest.mark.parametrize("load", LOADERS, ids=["kernels", "torch"])
def test_the_small_model_computes_what_transformers_computes(
    small_model: FilePath, load: Callable[..., Decoder]
) -> None:
    decoder = load(small_model, dtype=torch.float32)
    tokens = random_tokens(150, seed=1, vocab=decoder.config.vocab_size)
    expected = reference_logits(small_model, torch.from_numpy(tokens))
    got = in_chunks(decoder, Path(tokens, 1), [100, 1, 9, 1, 1])
    assert difference(got, expected) <= SMALL_TOLERANCE
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR_MARGIN
    assert torch.equal(got.argmax(-1)[clear], expected.argmax(-1)[clear])
