"""Building blocks of the decoder: linear maps, norms, rotary embedding, one transformer block."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from target_workers.model.config import ModelConfig, RopeConfig

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""From a rank's partial sums [rows, hidden] to the sums over all ranks, the same bits on each."""


class Attend(Protocol):
    """Attention of one layer over whatever its rows may see."""

    def __call__(self, layer: int, qk: Tensor, values: Tensor) -> Tensor: ...


def whole(partial: Tensor) -> Tensor:
    """The Reduce of a decoder in one piece."""
    return partial


class Linear(nn.Module):
    """y = x W^T + b for W [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * w over the last dimension, in float32 inside."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadNorm(nn.Module):
    """Qwen3's norm of each query and key head, before rotation; w [heads + kv_heads, head_dim]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight


class Rotary(nn.Module):
    """Cosines and signed sines of every position, so that a row's angles are a lookup."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        frequencies, scale = rope_frequencies(config.rope, config.head_dim)
        angles = torch.arange(config.max_context).float()[:, None] * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.cos = nn.Buffer(torch.cat((cos, cos), -1).to(dtype), persistent=False)
        self.sin = nn.Buffer(torch.cat((-sin, sin), -1).to(dtype), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The angles of `positions` [rows]: two of [rows, 1, head_dim]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [rows, heads, head_dim]: element i pairs with i + head_dim / 2."""
    cos, sin = angles
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position [head_dim / 2] in float32 and the factor on cosines and sines.

    The arithmetic and its order are those of transformers' modeling_rope_utils.
    """
    plain = 1.0 / _waves(rope.theta, head_dim)
    match rope.kind:
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(plain, rope, head_dim), _yarn_scale(rope)
        case _:
            return plain, 1.0


def _waves(theta: float, head_dim: int) -> Tensor:
    """Positions per radian, unscaled."""
    waves: Tensor = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return waves


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    waves = 2 * math.pi / plain
    blend = (rope.original_context / waves - low) / (high - low)
    smooth = (1 - blend) * plain / rope.factor + blend * plain
    slowed = torch.where(waves > rope.original_context / low, plain / rope.factor, plain)
    between = (waves >= rope.original_context / high) & (waves <= rope.original_context / low)
    return torch.where(between, smooth, slowed)


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Dimensions that turn less than beta_slow times are slowed, more than beta_fast kept."""

    def dimension(turns: float) -> float:
        ratio = math.log(rope.original_context / (turns * 2 * math.pi))
        return head_dim * ratio / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    kept = 1 - ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    slowed = 1.0 / (rope.factor * _waves(rope.theta, head_dim))
    return slowed * (1 - kept) + plain * kept


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


@dataclass(frozen=True, slots=True)
class BlockParts:
    """What a block is made of; `qkv` and `gate_up` are fused along their outputs."""

    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: HeadNorm | None
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class Block(nn.Module):
    """Attention and gated MLP, each behind a norm and added to the stream.

    `out` and `down` give a rank's partial sums, in the type of the stream or a wider one.
    """

    def __init__(self, index: int, config: ModelConfig, parts: BlockParts) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        self.split = (config.num_heads + config.num_kv_heads, config.num_kv_heads)
        self.attention_norm, self.mlp_norm = parts.attention_norm, parts.mlp_norm
        self.qkv, self.out, self.qk_norm = parts.qkv, parts.out, parts.qk_norm
        self.gate_up, self.down = parts.gate_up, parts.down

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, reduce: Reduce
    ) -> Tensor:
        """x [rows, hidden] through the block."""
        heads = self.qkv(self.attention_norm(x)).view(len(x), -1, self.head_dim)
        qk, values = heads.split(self.split, 1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        x = _add(x, reduce(self.out(attend(self.index, rotate(qk, angles), values))))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return _add(x, reduce(self.down(F.silu(gate) * up)))


def _add(x: Tensor, sums: Tensor) -> Tensor:
    """x + sums in the type of x, rounded once."""
    return (x + sums).to(x.dtype)
