"""From a Hugging Face folder to a decoder: the tensor names of the Llama-shaped families."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from target_workers.model.checkpoint import Checkpoint
from target_workers.model.config import ModelConfig, ModelError
from target_workers.model.decoder import Decoder, TorchDecoder
from target_workers.model.layers import Block, BlockParts, HeadNorm, Linear, Reduce, RMSNorm, whole
from target_workers.model.native.decoder import NativeDecoder, Packer, Parts
from target_workers.model.shard import WHOLE, Portion, Shard, local_config, portion

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """Which rank's part of a model to load, and how that rank sums up partial results.

    `loan` is for a model that has no embedding and head of its own.
    """

    shard: Shard = WHOLE
    reduce: Reduce = whole
    loan: "Loan | None" = None


@dataclass(frozen=True, slots=True)
class Loan:
    """The folder whose embedding and head a model uses; its logits are those of `ids` (none: all).

    The model's own folder then names `ids` in tensors that are not weights.
    """

    folder: Path
    ids: tuple[int, ...] | None = None


def load_decoder(
    folder: Path | str,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    part: Part = Part(),
    int8: bool = False,
) -> Decoder:
    """Load a model folder, or one rank's part of it, onto a device; `int8` keeps its weights so.

    On the CPU it runs on our own kernels, and is exact, where they know its kind. Raises
    ModelError. Not yet run on CUDA.
    """
    config = ModelConfig.from_folder(folder)
    if device == "cpu" and config.has_kernels(NAMES[dtype]):
        return _native(Path(folder), config, dtype, part, int8=int8)
    if int8:
        raise ModelError(
            f"no kernel here takes int8 weights with {dtype} and heads of {config.head_dim} on"
            f" {device}; leave target.weight_dtype empty"
        )
    if device != "cpu" and not torch.cuda.is_available():
        raise ModelError("no CUDA device is visible to this worker; set device to cpu")
    return load_reference(folder, dtype=dtype, part=part).to(device)


def load_reference(folder: Path | str, *, dtype: torch.dtype, part: Part = Part()) -> TorchDecoder:
    """The same decoder of torch's own operators, on the CPU. Raises ModelError."""
    config = ModelConfig.from_folder(folder)
    tensors = Checkpoint(Path(folder), dtype)
    ends = _ends(config, part, tensors)
    blocks = [layer.block() for layer in _layers(config, part.shard, tensors)]
    _finish(config, part, tensors)
    local = local_config(config, part.shard)
    return TorchDecoder(local, ends.embedding, blocks, ends.norm, ends.head, part.reduce)


def _native(
    folder: Path, config: ModelConfig, dtype: torch.dtype, part: Part, *, int8: bool
) -> NativeDecoder:
    tensors = Checkpoint(folder, dtype)
    local = local_config(config, part.shard)
    packer = Packer(local, dtype, as_int8=int8)
    ends = _ends(config, part, tensors)
    # One by one: the plain weights of a block are gone before the next one is read.
    blocks = [packer.block(layer.block()) for layer in _layers(config, part.shard, tensors)]
    _finish(config, part, tensors)
    norm, head = packer.norm(ends.norm), packer.linear(ends.head)
    parts = Parts(ends.embedding, blocks, norm, head, len(ends.head.weight))
    return NativeDecoder(local, parts, in_pairs=packer.in_pairs, reduce=part.reduce)


@dataclass(frozen=True, slots=True)
class _Ends:
    """What comes before and after the blocks."""

    embedding: Tensor
    norm: RMSNorm
    head: Linear


def _ends(config: ModelConfig, part: Part, tensors: Checkpoint) -> _Ends:
    hidden, vocab = config.hidden_size, config.vocab_size
    rows = portion(config, part.shard).vocab
    norm = RMSNorm(tensors.take("model.norm.weight", hidden), config.norm_eps)
    if part.loan is not None:
        return _lent(config, part.loan, norm)
    embedding = tensors.take("model.embed_tokens.weight", vocab, hidden)
    if config.tied:
        return _Ends(embedding, norm, Linear(embedding[rows.start : rows.stop]))
    return _Ends(embedding, norm, Linear(tensors.take("lm_head.weight", vocab, hidden, rows=rows)))


def _lent(config: ModelConfig, loan: Loan, norm: RMSNorm) -> _Ends:
    """With the embedding and head of another model. Raises ModelError if they do not fit."""
    lender = ModelConfig.from_folder(loan.folder)
    if (lender.hidden_size, lender.vocab_size) != (config.hidden_size, config.vocab_size):
        raise ModelError(
            f"{loan.folder} has {lender.vocab_size} tokens of {lender.hidden_size} values, the "
            f"model that borrows them {config.vocab_size} of {config.hidden_size}; they belong to "
            "different models"
        )
    tensors = Checkpoint(loan.folder, norm.weight.dtype)
    shape = (lender.vocab_size, lender.hidden_size)
    embedding = tensors.take("model.embed_tokens.weight", *shape)
    head = embedding if lender.tied else tensors.take("lm_head.weight", *shape)
    return _Ends(embedding, norm, Linear(head if loan.ids is None else head[list(loan.ids)]))


def read_head(folder: Path) -> Tensor:
    """A model's head alone, bfloat16 [vocab, hidden]. Raises ModelError."""
    config = ModelConfig.from_folder(folder)
    name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    return Checkpoint(folder, torch.bfloat16).take(name, config.vocab_size, config.hidden_size)


def _layers(config: ModelConfig, shard: Shard, tensors: Checkpoint) -> Iterator["_Layer"]:
    for index in range(config.num_layers):
        yield _Layer(index, config, shard, tensors)


def _finish(config: ModelConfig, part: Part, tensors: Checkpoint) -> None:
    ignored = {"lm_head.weight"} if config.tied else set()
    if part.loan is not None:
        ignored = {"d2t", "t2d"}
    tensors.finish(ignored=frozenset(ignored))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's tensors, and which of their rows and columns a rank holds.

    `qkv` and `gate_up` are split by outputs, `out` and `down` by inputs, so that their results are
    partial sums; a bias of those is added by the first rank alone.
    """

    index: int
    config: ModelConfig
    shard: Shard
    tensors: Checkpoint

    def block(self) -> Block:
        """The block of what the rank holds."""
        config, held = self.config, portion(self.config, self.shard)
        heads, kv_heads = self._rows(held.heads), self._rows(held.kv_heads)
        all_heads, all_kv_heads = self._width(config.num_heads), self._width(config.num_kv_heads)
        qkv = {
            "self_attn.q_proj": (all_heads, heads),
            "self_attn.k_proj": (all_kv_heads, kv_heads),
            "self_attn.v_proj": (all_kv_heads, kv_heads),
        }
        inner = (config.intermediate_size, held.inner)
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        parts = BlockParts(
            attention_norm=self._norm("input_layernorm"),
            qkv=self._by_outputs(qkv, bias=config.qkv_bias),
            qk_norm=self._head_norm(held) if config.qk_norm else None,
            out=self._by_inputs("self_attn.o_proj", all_heads, heads, bias=config.output_bias),
            mlp_norm=self._norm("post_attention_layernorm"),
            gate_up=self._by_outputs(gate_up, bias=config.mlp_bias),
            down=self._by_inputs("mlp.down_proj", *inner, bias=config.mlp_bias),
        )
        return Block(self.index, local_config(config, self.shard), parts)

    def _by_outputs(self, names: dict[str, tuple[int, range]], *, bias: bool) -> Linear:
        """Linears of so many outputs as one, of these rows of each."""

        def stacked(kind: str, *width: int) -> Tensor:
            taken = [
                self.tensors.take(self._name(f"{name}.{kind}"), outputs, *width, rows=rows)
                for name, (outputs, rows) in names.items()
            ]
            return torch.cat(taken)

        weight = stacked("weight", self.config.hidden_size)
        return Linear(weight, stacked("bias") if bias else None)

    def _by_inputs(self, name: str, inputs: int, columns: range, *, bias: bool) -> Linear:
        hidden = self.config.hidden_size
        weight = self.tensors.take(self._name(f"{name}.weight"), hidden, inputs, columns=columns)
        if not bias:
            return Linear(weight)
        self.tensors.expect(self._name(f"{name}.bias"), hidden)
        is_first = self.shard.rank == 0
        return Linear(
            weight, self.tensors.take(self._name(f"{name}.bias"), hidden) if is_first else None
        )

    def _norm(self, name: str) -> RMSNorm:
        weight = self.tensors.take(self._name(f"{name}.weight"), self.config.hidden_size)
        return RMSNorm(weight, self.config.norm_eps)

    def _head_norm(self, held: Portion) -> HeadNorm:
        rows: list[Tensor] = []
        for name, heads in (("q_norm", held.heads), ("k_norm", held.kv_heads)):
            weight = self.tensors.take(self._name(f"self_attn.{name}.weight"), self.config.head_dim)
            rows.append(weight.expand(len(heads), -1))
        return HeadNorm(torch.cat(rows), self.config.norm_eps)

    def _name(self, name: str) -> str:
        return f"model.layers.{self.index}.{name}"

    def _width(self, heads: int) -> int:
        return heads * self.config.head_dim

    def _rows(self, heads: range) -> range:
        return range(self._width(heads.start), self._width(heads.stop))
