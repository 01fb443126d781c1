"""A distilled student on disk: a model folder that may borrow its target's embedding and head.

Such a config.json has `borrows_from`, the hash of those, and, with a reduced vocabulary,
`draft_vocab_size`; the weights then hold `d2t` (int64, target id minus draft id) and `t2d` (bool,
which target ids it knows), as EAGLE-3 checkpoints do. Int8 matrices have a float32 `weight_scale`
[out, 1] beside them, as compressed-tensors writes channel-wise int8.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from target_workers.model.config import Json, ModelConfig, ModelError, read_config
from target_workers.model.decoder import TorchDecoder
from target_workers.model.files import SINGLE_FILE
from target_workers.model.layers import Block
from target_workers.model.loading import Loan

BORROWS_FROM = "borrows_from"
DRAFT_VOCAB = "draft_vocab_size"
INT8_MOST = 127


@dataclass(frozen=True, slots=True)
class Borrowed:
    """The hash of the model whose ends a student uses, and the ids it can propose (none: all)."""

    lender_hash: str
    ids: tuple[int, ...] | None = None

    def loan(self, lender: Path) -> Loan:
        """What `load_decoder` needs to read the ends."""
        return Loan(lender, self.ids)


def read_borrowed(folder: Path) -> Borrowed | None:
    """What a model folder borrows, if anything. Raises ModelError."""
    config = read_config(folder)
    if BORROWS_FROM not in config:
        return None
    ids = _read_ids(folder, config) if DRAFT_VOCAB in config else None
    return Borrowed(str(config[BORROWS_FROM]), ids)


def _read_ids(folder: Path, config: Mapping[str, Json]) -> tuple[int, ...]:
    """The target's ids in the order of the draft's. Raises ModelError."""
    vocab = ModelConfig.from_folder(folder).vocab_size
    try:
        with safe_open(folder / SINGLE_FILE, framework="pt") as file:
            offsets = file.get_tensor("d2t")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{folder} has a reduced vocabulary and no d2t ({error}); export it again"
        ) from error
    ids = (offsets + torch.arange(len(offsets))).tolist()
    rising = all(a < b for a, b in pairwise(ids))
    if len(ids) != config[DRAFT_VOCAB] or not ids or not rising or ids[0] < 0 or ids[-1] >= vocab:
        raise ModelError(
            f"{folder}: d2t must name {config[DRAFT_VOCAB]} ids below {vocab} in rising order; "
            "export it again"
        )
    return tuple(ids)


def save_student(
    folder: Path,
    decoder: TorchDecoder,
    config: Mapping[str, Json],
    borrowed: Borrowed,
    *,
    int8: bool = False,
) -> None:
    """Write a student's own layers, as bfloat16 or int8. `config` is its config.json's shape."""
    folder.mkdir(parents=True, exist_ok=True)
    extra: dict[str, Json] = {BORROWS_FROM: borrowed.lender_hash}
    tensors: dict[str, Tensor] = {}
    if borrowed.ids is not None:
        extra[DRAFT_VOCAB] = len(borrowed.ids)
        ids = torch.tensor(borrowed.ids)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(decoder.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    for name, tensor in own_tensors(decoder).items():
        if int8 and tensor.dim() == 2:
            tensors[name], tensors[f"{name}_scale"] = _int8(tensor)
        else:
            tensors[name] = tensor.bfloat16().contiguous()
    (folder / "config.json").write_text(json.dumps({**config, **extra}, indent=2) + "\n")
    save_file(tensors, folder / SINGLE_FILE)
    # safetensors lets its owner alone read a file.
    shutil.copymode(folder / "config.json", folder / SINGLE_FILE)


def own_tensors(decoder: TorchDecoder) -> dict[str, Tensor]:
    """The blocks' and the last norm's weights by their names in a checkpoint."""
    config = decoder.config
    tensors = {"model.norm.weight": decoder.norm.weight.detach()}
    query, key = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    for block in decoder.blocks:
        assert isinstance(block, Block)
        base = f"model.layers.{block.index}"
        parts: dict[str, Tensor] = {}
        for kind, value in block.qkv.named_parameters():
            names = (f"self_attn.{name}_proj.{kind}" for name in "qkv")
            parts |= zip(names, value.split((query, key, key)), strict=True)
        for kind, value in block.gate_up.named_parameters():
            names = (f"mlp.{name}_proj.{kind}" for name in ("gate", "up"))
            parts |= zip(names, value.chunk(2), strict=True)
        for name, linear in (("self_attn.o_proj", block.out), ("mlp.down_proj", block.down)):
            parts |= {f"{name}.{kind}": value for kind, value in linear.named_parameters()}
        if block.qk_norm is not None:
            parts["self_attn.q_norm.weight"] = block.qk_norm.weight[0]
            parts["self_attn.k_norm.weight"] = block.qk_norm.weight[-1]
        parts["input_layernorm.weight"] = block.attention_norm.weight
        parts["post_attention_layernorm.weight"] = block.mlp_norm.weight
        tensors |= {f"{base}.{name}": value.detach() for name, value in parts.items()}
    return tensors


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8 and what to multiply them by, float32 [out, 1]."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / INT8_MOST
    scale[scale == 0] = 1
    return (wide / scale).round().to(torch.int8), scale
