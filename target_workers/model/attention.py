"""Attention of ragged rows over slots; a row's bits do not depend on which rows share its batch.

The fused CPU kernel sums over the keys of a row in an order that only the number of keys decides,
as long as query rows come in fours (both measured). So a row always gets its keys padded to whole
blocks by its own position: rows are cut into tiles where that number changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from target_workers.model.batch import RowBatch
from target_workers.model.config import ModelConfig
from target_workers.model.kv_cache import KVCache
from target_workers.model.run import IntArray, Run

KEY_BLOCK = 128  # shorter ones save keys that are only masked, and cost calls
QUERY_BLOCK = 4  # fewer query rows take another code path


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Rows of one run within one block of positions: flat rows [first, first + count)."""

    run: Run
    first: int
    count: int
    end: int  # the position after the last row

    @property
    def keys(self) -> int:
        """Keys its rows get, masked ones included."""
        return -(-self.end // KEY_BLOCK) * KEY_BLOCK

    def fill(self, slots: IntArray) -> None:
        """Write the slot of every position; the padding repeats one of the run's own slots."""
        start = self.run.start
        slots[:start] = self.run.history
        slots[start : self.end] = self.run.slots[: self.end - start]
        slots[self.end :] = slots[0]


@dataclass(frozen=True, slots=True, eq=False)
class TileGroup:
    """Tiles of the same number of keys and about as many rows, attended in one call."""

    queries: Tensor  # [tiles * kv_heads * queries], into rows x (heads + kv_heads)
    slots: Tensor  # [tiles * keys]
    mask: Tensor  # [tiles, 1, queries, keys], 0 or -inf
    gathered: Tensor  # [tiles * keys, 2, kv_heads, head_dim], used anew by each layer

    def to(self, device: torch.device) -> "TileGroup":
        """The same group on a device."""
        parts = (self.queries, self.slots, self.mask, self.gathered)
        return TileGroup(*(part.to(device) for part in parts))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Index maps and masks of one forward, shared by its layers."""

    groups: tuple[TileGroup, ...]
    output: Tensor  # [rows * heads], into the groups' outputs one after another
    batch: RowBatch
    config: ModelConfig

    def to(self, device: torch.device) -> "AttentionPlan":
        """The same plan with its maps and masks on a device."""
        groups = tuple(group.to(device) for group in self.groups)
        output, batch = self.output.to(device), self.batch.to(device)
        return AttentionPlan(groups, output, batch, self.config)


@dataclass(frozen=True, slots=True, eq=False)
class CachedAttention:
    """Writes a layer's new keys and values to their slots, then attends over the cache."""

    plan: AttentionPlan
    cache: KVCache

    def __call__(self, layer: int, qk: Tensor, values: Tensor) -> Tensor:
        """From qk [rows, heads + kv_heads, head_dim] and values to [rows, heads * head_dim]."""
        keys = qk[:, self.plan.config.num_heads :]
        self.cache.write(layer, self.plan.batch.slots, keys, values)
        return attend(qk, self.cache.layer(layer), self.plan)


def attend(qk: Tensor, cached: Tensor, plan: AttentionPlan) -> Tensor:
    """Attend qk [rows, heads + kv_heads, head_dim] over a layer: [rows, heads * head_dim]."""
    flat = qk.view(-1, qk.shape[-1])
    parts = [_attend_group(flat, cached, group) for group in plan.groups]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.index_select(0, plan.output).view(len(qk), -1)


def plan_attention(batch: RowBatch, config: ModelConfig, dtype: torch.dtype) -> AttentionPlan:
    """Cut the runs into tiles, group tiles of one size and build maps and masks."""
    positions = batch.positions.numpy()
    groups, output, base = [], np.empty((len(positions), config.num_heads), np.int64), 0
    for tiles in _group(_cut(batch.runs)):
        group = _build_group(tiles, positions, config, dtype)
        queries = group.mask.shape[2]
        for index, tile in enumerate(tiles):
            rows = slice(tile.first, tile.first + tile.count)
            output[rows] = base + _output_map(index, tile.count, queries, config)
        groups.append(group)
        base += len(group.queries)
    output[batch.num_rows :] = output[batch.num_rows - 1]
    return AttentionPlan(tuple(groups), torch.from_numpy(output.ravel()), batch, config)


def _attend_group(flat: Tensor, cached: Tensor, group: TileGroup) -> Tensor:
    """Outputs in the order [tiles, queries, kv_heads] as rows of head_dim."""
    tiles, _, queries, keys = group.mask.shape
    _, _, kv_heads, head_dim = cached.shape
    query = flat.index_select(0, group.queries).view(tiles, kv_heads, queries, head_dim)
    kv = torch.index_select(cached, 0, group.slots, out=group.gathered)
    key, value = kv.view(tiles, keys, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
    return out.transpose(1, 2).reshape(-1, head_dim)


def _cut(runs: Iterable[Run]) -> list[Tile]:
    tiles, first = [], 0
    for run in runs:
        start = run.start
        while start < run.end:
            end = min(start - start % KEY_BLOCK + KEY_BLOCK, run.end)
            tiles.append(Tile(run, first, end - start, end))
            first, start = first + end - start, end
    return tiles


def _group(tiles: list[Tile]) -> list[list[Tile]]:
    """Tiles that waste little when their rows are padded to the most among them."""
    groups: dict[tuple[int, int], list[Tile]] = {}
    for tile in tiles:
        groups.setdefault((_size_class(tile.count), tile.keys), []).append(tile)
    return list(groups.values())


def _size_class(size: int) -> int:
    """Sizes of a class differ by less than half: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ..."""
    power = 1 << (size - 1).bit_length()
    return power if size > power * 3 // 4 else power * 3 // 4


def _build_group(
    tiles: list[Tile], positions: IntArray, config: ModelConfig, dtype: torch.dtype
) -> TileGroup:
    keys = tiles[0].keys
    slots = np.empty((len(tiles), keys), np.int64)
    for tile, row in zip(tiles, slots, strict=True):
        tile.fill(row)
    folded = max(tile.count for tile in tiles) * config.group
    folded += -folded % QUERY_BLOCK
    offset, member = np.divmod(np.arange(folded), config.group)
    first = np.array([[tile.first] for tile in tiles])
    last = np.array([[tile.first + tile.count - 1] for tile in tiles])
    rows = np.minimum(first + offset, last)  # [tiles, queries], the last row fills up
    heads = np.arange(config.num_kv_heads)[:, None] * config.group + member  # [kv_heads, queries]
    stride = config.num_heads + config.num_kv_heads
    queries = rows[:, None] * stride + heads  # [tiles, kv_heads, queries]
    hidden = torch.arange(keys) > torch.from_numpy(positions[rows])[:, None, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return TileGroup(
        queries=torch.from_numpy(queries.ravel()),
        slots=torch.from_numpy(slots.ravel()),
        mask=mask,
        gathered=torch.empty((slots.size, 2, config.num_kv_heads, config.head_dim), dtype=dtype),
    )


def _output_map(index: int, count: int, queries: int, config: ModelConfig) -> IntArray:
    """Where tile `index` of a group leaves the heads of its rows: [count, heads]."""
    kv_head, member = np.divmod(np.arange(config.num_heads), config.group)
    query = np.arange(count)[:, None] * config.group + member
    return (index * queries + query) * config.num_kv_heads + kv_head
