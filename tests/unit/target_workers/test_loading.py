"""A model folder is loaded whole or refused with a message that names what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from target_workers.model.config import Json, ModelConfig, ModelError
from target_workers.model.files import model_hash
from target_workers.model.loading import load_decoder, load_reference
from tests.tiny import make_tiny_llama

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), 0)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit_config(folder: Path, **changes: Json) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def shard(folder: Path) -> None:
    """Split the weights over two files with an index, as large models come."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"model-{index}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


def load_error(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_decoder(folder, dtype=torch.float32)
    return str(caught.value)


def test_a_missing_folder_or_config_is_named(tmp_path: Path) -> None:
    assert "no model folder" in load_error(tmp_path / "nowhere")
    assert "no config.json" in load_error(tmp_path)


def test_an_unsupported_architecture_names_the_supported_ones(folder: Path) -> None:
    edit_config(folder, architectures=["MambaForCausalLM"])
    message = load_error(folder)
    assert "MambaForCausalLM" in message
    assert "LlamaForCausalLM" in message and "Qwen3ForCausalLM" in message


def test_an_unsupported_rope_is_named(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    message = load_error(folder)
    assert "longrope" in message and "yarn" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 0), ("hidden_size", "64"), ("rope_parameters", 3), ("mlp_bias", 1)],
)
def test_a_wrong_value_in_the_config_is_named(folder: Path, key: str, value: Json) -> None:
    edit_config(folder, **{key: value})
    assert key in load_error(folder)


MISTRAL, LLAMA = "MistralForCausalLM", "LlamaForCausalLM"
QWEN = "Qwen2ForCausalLM"
SLIDING, FULL = "sliding_attention", "full_attention"
ON = {"use_sliding_window": True, "sliding_window": 128}


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        (MISTRAL, {"sliding_window": 128}, (128, 128)),
        (MISTRAL, {"sliding_window": None}, ()),
        (MISTRAL, {"sliding_window": 2047}, (2047, 2047)),
        (MISTRAL, {"sliding_window": 2048}, ()),
        (MISTRAL, {"max_position_embeddings": 32768}, (4096, 4096)),
        (LLAMA, {"sliding_window": 128}, ()),
        (QWEN, {"sliding_window": 128}, ()),
        (QWEN, {**ON, "use_sliding_window": False}, ()),
        (QWEN, ON, ()),
        (QWEN, {**ON, "max_window_layers": 1}, (0, 128)),
        (QWEN, {**ON, "max_window_layers": 0}, (128, 128)),
        (QWEN, {**ON, "max_window_layers": 2}, ()),
        (QWEN, {**ON, "layer_types": [SLIDING, FULL], "max_window_layers": 0}, (128, 0)),
        (QWEN, {**ON, "layer_types": [FULL, FULL]}, ()),
        ("Qwen3ForCausalLM", {**ON, "max_window_layers": 1}, (0, 128)),
    ],
)
def test_every_layer_has_the_window_that_transformers_gives_it(
    folder: Path, architecture: str, changes: dict[str, Json], windows: tuple[int, ...]
) -> None:
    edit_config(folder, architectures=[architecture], **changes)
    config = ModelConfig.from_folder(folder)
    assert config.windows == windows
    assert [config.window(layer) for layer in (0, 1)] == list(windows or (0, 0))
    assert config.max_context == changes.get("max_position_embeddings", 2048)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sliding_window": "128"}, "sliding_window"),
        ({"max_window_layers": -1}, "max_window_layers"),
        ({"layer_types": [SLIDING]}, "layer_types"),
        ({"layer_types": [SLIDING, "chunked_attention"]}, "layer_types"),
        ({"layer_types": [SLIDING, [FULL]]}, "layer_types"),
    ],
)
def test_a_window_that_makes_no_sense_is_named(
    folder: Path, changes: dict[str, Json], key: str
) -> None:
    edit_config(folder, architectures=[QWEN], **{**ON, **changes})
    assert key in load_error(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight is missing" in load_error(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.adapter.weight": torch.zeros(2)}))
    assert "model.adapter.weight" in load_error(folder)


def test_a_misshapen_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    assert "model.norm.weight has shape [63]" in load_error(folder)


def test_a_quantised_tensor_is_refused(folder: Path) -> None:
    whole = torch.zeros(64, dtype=torch.int8)
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": whole}))
    assert "quantised" in load_error(folder)


@pytest.mark.parametrize("keep", [0.9, 0.5])
def test_a_truncated_file_names_a_tensor(folder: Path, keep: float) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(len(data) * keep)])
    message = load_error(folder)
    assert "tensor model." in message and "truncated" in message


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0hello"])
def test_a_file_that_is_no_safetensors_is_refused(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert WEIGHTS in load_error(folder)


def test_shards_load_like_one_file(folder: Path, original: Path) -> None:
    shard(folder)
    whole = load_reference(original, dtype=torch.float32)
    parts = load_reference(folder, dtype=torch.float32)
    assert torch.equal(whole.embedding, parts.embedding)
    assert model_hash(folder) == model_hash(original)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-1.safetensors").unlink()
    assert "lacks model-1.safetensors" in load_error(folder)


def test_the_hash_sees_weights_and_config_but_not_who_saved_them(
    folder: Path, original: Path
) -> None:
    edit_config(folder, transformers_version="0.0.1")
    assert model_hash(folder) == model_hash(original)
    edit_config(folder, rms_norm_eps=0.5)
    assert model_hash(folder) != model_hash(original)
    edit_config(
        folder, rms_norm_eps=json.loads((original / "config.json").read_text())["rms_norm_eps"]
    )
    edit_weights(folder, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert model_hash(folder) != model_hash(original)
