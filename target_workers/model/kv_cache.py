"""Keys and values of every layer, one slot per token; who owns a slot is the caller's business."""

import torch
from torch import Tensor

from target_workers.model.config import ModelConfig


class KVCache:
    """A row of one layer holds its keys, then its values: one gather fetches both."""

    def __init__(
        self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.num_slots = num_slots
        self.dtype = dtype
        shape = (config.num_layers, num_slots, 2, config.num_kv_heads, config.head_dim)
        # Zeros: what a mask hides must be finite.
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = self._data.unbind(0)

    def layer(self, layer: int) -> Tensor:
        """Keys and values of a layer: [slots, 2, kv_heads, head_dim]."""
        return self._layers[layer]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [rows, kv_heads, head_dim] of one layer in `slots` [rows]."""
        rows = self._layers[layer]
        rows[:, 0].index_copy_(0, slots, keys)
        rows[:, 1].index_copy_(0, slots, values)

    @torch.inference_mode()
    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` slots onto `target` slots in all layers; the two may overlap."""
        if source.numel():
            source, target = source.to(self._data.device), target.to(self._data.device)
            self._data.index_copy_(1, target, self._data.index_select(1, source))
