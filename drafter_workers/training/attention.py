"""Attention of whole sequences over themselves, without a cache and with gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from target_workers.model.decoder import TorchDecoder
from target_workers.model.layers import Attend


def causal(decoder: TorchDecoder, rows: int) -> Attend:
    """Attention of `rows` sequences of equal length over themselves, without a cache."""
    config = decoder.config

    def attend(layer: int, qk: Tensor, values: Tensor) -> Tensor:
        length = len(qk) // rows
        queries, keys = qk.split((config.num_heads, config.num_kv_heads), 1)
        by_head = (_by_head(each, rows) for each in (queries, keys, values))
        q, k, v = by_head
        window = config.window(layer)
        mask = None if not window else _banded(length, window, qk.device)
        mixed = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(config.group, 1),
            v.to(q.dtype).repeat_interleave(config.group, 1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return mixed.transpose(1, 2).reshape(len(qk), -1)

    return attend


def _by_head(flat: Tensor, rows: int) -> Tensor:
    """[rows * t, heads, head_dim] as [rows, heads, t, head_dim]."""
    by_row: Tensor = flat.unflatten(0, (rows, -1))
    return by_row.transpose(1, 2)


def _banded(length: int, window: int, device: torch.device) -> Tensor:
    """Which keys each of `length` rows sees: the last `window`, its own included."""
    place = torch.arange(length, device=device)
    behind = place[:, None] - place
    return (behind >= 0) & (behind < window)
