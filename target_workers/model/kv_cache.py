"""Keys and values of every layer, one slot per token; who owns a slot is the caller's business.

As int8 the keys of a slot have a scale for each head, and so have its values: what is in one slot,
finite or not, changes no other.
"""

import torch
from torch import Tensor

from target_workers.model.config import ModelConfig

INT8_MOST = 127
LEAST_HEAD = 1e-30  # as large a head of zeros is taken for: its scale must not be zero


class KVCache:
    """A row of one layer holds its keys, then its values: one gather fetches both.

    `feature_size` bfloat16 values of a projected hidden state have room beside each row. One slot
    more, `spare`, is nobody's: rows that only fill up a forward of a fixed size are written there.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        dtype: torch.dtype,
        device: str = "cpu",
        feature_size: int = 0,
    ) -> None:
        self.num_slots = self.spare = num_slots
        self.dtype = dtype
        shape = (config.num_layers, num_slots + 1, 2, config.num_kv_heads, config.head_dim)
        # Zeros: what a mask hides must be finite.
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = self._data.unbind(0)
        heads = shape[:-1] if dtype is torch.int8 else (0,)
        self._scales = torch.zeros(heads, device=device)
        self._layer_scales = self._scales.unbind(0)
        self._features = torch.zeros((num_slots, feature_size), dtype=torch.bfloat16, device=device)

    @property
    def feature_size(self) -> int:
        """How many feature values a slot has room for."""
        return self._features.shape[1]

    def layer(self, layer: int) -> Tensor:
        """Keys and values of a layer as they are stored: [slots, 2, kv_heads, head_dim]."""
        return self._layers[layer][: self.num_slots]

    def pages(self, layer: int) -> Tensor:
        """The same as pages of one token, and the spare one: [slots + 1, 2, 1, kv_heads, head_dim].

        None of it is copied.
        """
        return self._layers[layer].unsqueeze(2)

    def layer_scales(self, layer: int) -> Tensor | None:
        """What the int8 values of a layer are to be multiplied by, float32 [slots, 2, kv_heads].

        None where the cache is of another type.
        """
        return self._layer_scales[layer][: self.num_slots] if self._layer_scales else None

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [rows, kv_heads, head_dim] of one layer in `slots` [rows]."""
        rows = self._layers[layer]
        scales = self._layer_scales[layer] if self._layer_scales else None
        for part, new in enumerate((keys, values)):
            if scales is not None:
                new, scale = quantised(new)
                scales[:, part].index_copy_(0, slots, scale)
            rows[:, part].index_copy_(0, slots, new.to(self.dtype))

    def read(self, layer: int, slots: Tensor, into: Tensor) -> Tensor:
        """Fill `into` [n, 2, kv_heads, head_dim] from `slots` [n], in its own type."""
        rows, scales = self._layers[layer], self.layer_scales(layer)
        if rows.dtype == into.dtype:
            return torch.index_select(rows, 0, slots, out=into)
        picked = rows.index_select(0, slots)
        if scales is None:
            return into.copy_(picked)
        return into.copy_(picked * scales.index_select(0, slots).unsqueeze(-1))

    @torch.inference_mode()
    def write_features(self, slots: Tensor, values: Tensor) -> None:
        """Put features [rows, feature_size] beside the rows in `slots` [rows]."""
        self._features.index_copy_(0, slots, values.to(self._features.dtype))

    def features(self, slots: Tensor) -> Tensor:
        """The features beside the rows in `slots`: bfloat16 [rows, feature_size]."""
        return self._features.index_select(0, slots)

    @torch.inference_mode()
    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` slots onto `target` slots in all layers; the two may overlap."""
        if not source.numel():
            return
        source, target = source.to(self._data.device), target.to(self._data.device)
        self._data.index_copy_(1, target, self._data.index_select(1, source))
        if self._layer_scales:
            self._scales.index_copy_(1, target, self._scales.index_select(1, source))
        if self.feature_size:
            self._features.index_copy_(0, target, self._features.index_select(0, source))


def quantised(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Heads [rows, heads, head_dim] as int8, and what to multiply them by: float32 [rows, heads].

    Halves go to the even value. A head with a value that is not finite comes back without any.
    """
    wide = heads.float()
    scale = wide.abs().amax(-1).clamp_(min=LEAST_HEAD) / INT8_MOST
    steps = (wide / scale.unsqueeze(-1)).round_().clamp_(-INT8_MOST, INT8_MOST)
    # What no int8 can say is in the scale, which makes all of the head NaN.
    return steps.nan_to_num_(nan=0.0).to(torch.int8), scale.where(scale.isfinite(), torch.nan)
