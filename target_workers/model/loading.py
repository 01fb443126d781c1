"""From a Hugging Face folder to a decoder: the tensor names of the Llama-shaped families."""

from pathlib import Path

import torch
from torch import Tensor

from target_workers.model.checkpoint import Checkpoint, model_hash
from target_workers.model.config import ModelConfig, ModelError
from target_workers.model.decoder import Decoder
from target_workers.model.exact import ExactModeError, fit_rows
from target_workers.model.layers import Block, BlockParts, HeadNorm, Linear, RMSNorm

__all__ = ["DTYPES", "load_decoder", "model_hash"]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def load_decoder(
    folder: Path | str, *, dtype: torch.dtype, exact: bool, device: str = "cpu"
) -> Decoder:
    """Load a model folder onto a device; on the CPU with weights packed for its kernels.

    Raises ModelError, and ExactModeError where `exact` cannot be had. Not yet run on CUDA.
    """
    if device != "cpu":
        _check_device(device, exact=exact)
    config = ModelConfig.from_folder(folder)
    tensors = Checkpoint(Path(folder), dtype)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = tensors.take("model.embed_tokens.weight", vocab, hidden)
    blocks = [_block(index, config, tensors) for index in range(config.num_layers)]
    norm = RMSNorm(tensors.take("model.norm.weight", hidden), config.norm_eps)
    head = Linear(embedding if config.tied else tensors.take("lm_head.weight", vocab, hidden))
    tensors.finish(ignored=frozenset({"lm_head.weight"} if config.tied else ()))
    decoder = Decoder(config, embedding, blocks, norm, head)
    if device != "cpu":
        return decoder.to(device)
    linears = [module for module in decoder.modules() if isinstance(module, Linear)]
    for linear in linears:
        linear.pack()
    if exact:
        fit_rows(linears)
        decoder.least_rows = max(linear.least_rows for linear in linears)
    return decoder


def _check_device(device: str, *, exact: bool) -> None:
    if exact:
        raise ExactModeError(f"exact mode is for CPUs so far, not {device}; set exact = false")
    if not torch.cuda.is_available():
        raise ModelError("no CUDA device is visible to this worker; set device to cpu")


def _block(index: int, config: ModelConfig, tensors: Checkpoint) -> Block:
    prefix = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def linear(names: list[str], outs: list[int], width: int, bias: bool) -> Linear:
        weights = tensors.stack([f"{n}.weight" for n in names], *((out, width) for out in outs))
        if not bias:
            return Linear(weights)
        return Linear(
            weights, tensors.stack([f"{n}.bias" for n in names], *((out,) for out in outs))
        )

    def norm(name: str) -> RMSNorm:
        return RMSNorm(tensors.take(f"{prefix}.{name}.weight", hidden), config.norm_eps)

    qkv = [f"{attention}.{name}_proj" for name in "qkv"]
    gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    parts = BlockParts(
        attention_norm=norm("input_layernorm"),
        qkv=linear(qkv, [heads, kv, kv], hidden, config.qkv_bias),
        qk_norm=_head_norm(attention, config, tensors) if config.qk_norm else None,
        out=linear([f"{attention}.o_proj"], [hidden], heads, config.output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear(gate_up, [inner, inner], hidden, config.mlp_bias),
        down=linear([f"{mlp}.down_proj"], [hidden], inner, config.mlp_bias),
    )
    return Block(index, config, parts)


def _head_norm(attention: str, config: ModelConfig, tensors: Checkpoint) -> HeadNorm:
    counts = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
    rows: list[Tensor] = []
    for name, count in counts.items():
        rows.append(tensors.take(f"{attention}.{name}.weight", config.head_dim).expand(count, -1))
    return HeadNorm(torch.cat(rows), config.norm_eps)
