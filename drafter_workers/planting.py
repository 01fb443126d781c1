"""A student's first weights: chosen layers of its target."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drafter_workers.student import BORROWS_FROM, DRAFT_VOCAB, Borrowed
from target_workers.model.config import Json, ModelConfig, ModelError, read_config
from target_workers.model.files import SINGLE_FILE, read_entries


def plant(target: Path, folder: Path, layers: Sequence[int], borrowed: Borrowed) -> None:
    """Write a student that is these layers of its target, in this order. Raises ModelError."""
    _check_layers(layers, ModelConfig.from_folder(target).num_layers)
    config = planted_config(read_config(target), layers)
    names = {"model.norm.weight": "model.norm.weight"}
    entries = read_entries(target)
    for index, layer in enumerate(layers):
        own = f"model.layers.{layer}."
        names |= {
            name: f"model.layers.{index}.{name.removeprefix(own)}"
            for name in entries
            if name.startswith(own)
        }
    tensors = {}
    for name, new in names.items():
        with safe_open(entries[name].path, framework="pt") as file:
            tensors[new] = file.get_tensor(name)
    extra: dict[str, Json] = {BORROWS_FROM: borrowed.lender_hash}
    if borrowed.ids is not None:
        extra[DRAFT_VOCAB] = len(borrowed.ids)
        tensors["d2t"] = torch.tensor(borrowed.ids) - torch.arange(len(borrowed.ids))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE_FILE)
    (folder / "config.json").write_text(json.dumps({**config, **extra}, indent=2) + "\n")


def _check_layers(layers: Sequence[int], count: int) -> None:
    """Raises ModelError."""
    if not layers or min(layers) < 0 or max(layers) >= count or len(set(layers)) < len(layers):
        raise ModelError(
            f"a student cannot start from layers {list(layers)}: name some of 0 to {count - 1}, "
            "each once"
        )


def planted_config(config: Mapping[str, Json], layers: Sequence[int]) -> dict[str, Json]:
    """A target's config.json for these layers of it alone."""
    kept = {key: value for key, value in config.items() if not key.startswith("_")}
    kinds = kept.get("layer_types")
    if isinstance(kinds, list):
        kept["layer_types"] = [kinds[layer] for layer in layers]
    return kept | {"num_hidden_layers": len(layers)}
