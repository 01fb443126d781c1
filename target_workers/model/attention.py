"""Attention of ragged rows over slots; a row's bits do not depend on which rows share its batch.

The fused CPU kernel sums over the keys of a row in an order that only the number of keys decides,
as long as query rows come in fours (both measured). So a row always gets its keys padded to whole
blocks by its own position: rows are cut into tiles where that number changes. Under a sliding
window the keys begin with the block that the first row of such a tile can see into; blocks before
it are not fetched, though their slots stay the sequence's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from target_workers.model.batch import RowBatch
from target_workers.model.config import ModelConfig
from target_workers.model.cuda_graphs import Compute, DecodeGraphs
from target_workers.model.kv_cache import KVCache
from target_workers.model.layers import Attend
from target_workers.model.run import IntArray, Run

KEY_BLOCK = 128  # shorter ones save keys that are only masked, and cost calls
QUERY_BLOCK = 4  # fewer query rows take another code path


@dataclass(frozen=True, slots=True)
class Setting:
    """The shape of a decoder, the type of its activations, and where it computes."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device


class Attention(Protocol):
    """A way to compute the attention of forwards; `name` is for people."""

    @property
    def name(self) -> str: ...

    def prepare(self, batch: RowBatch, cache: KVCache) -> tuple[RowBatch, Attend]:
        """A batch on the device and its attention, until the next forward is prepared."""
        ...

    def graphs(self, compute: Compute) -> DecodeGraphs | None:
        """Graphs of the forwards of a decoder over one cache; None where there can be none."""
        ...


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """The Attention of torch's own operators: for every type, on every device."""

    setting: Setting
    name: str = "torch"

    def prepare(self, batch: RowBatch, cache: KVCache) -> tuple[RowBatch, Attend]:
        setting = self.setting
        plan = plan_attention(batch, setting.config, setting.dtype).to(setting.device)
        return plan.batch, CachedAttention(plan, cache)

    def graphs(self, compute: Compute) -> DecodeGraphs | None:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Rows of one run within one block of positions: flat rows [first, first + count)."""

    run: Run
    first: int
    count: int
    end: int  # the position after the last row
    window: int  # how many keys a row sees, 0: all

    @property
    def begin(self) -> int:
        """The position of the first key, a function of the rows' block alone."""
        block = (self.end - 1) // KEY_BLOCK
        earliest = block * KEY_BLOCK - self.window + 1 if self.window else 0
        return max(earliest, 0) // KEY_BLOCK * KEY_BLOCK

    @property
    def keys(self) -> int:
        """Keys its rows get, masked ones included."""
        return -(-self.end // KEY_BLOCK) * KEY_BLOCK - self.begin

    def fill(self, slots: IntArray) -> None:
        """Write the slot of every position; the padding repeats one of the run's own slots."""
        begin, past = self.begin, self.run.history[self.begin :]
        own = self.run.slots[max(begin - self.run.start, 0) : self.end - self.run.start]
        slots[: len(past)] = past
        slots[len(past) : self.end - begin] = own
        slots[self.end - begin :] = slots[0]


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
class WindowPlan:
    """Index maps and masks of the layers with one window."""

    groups: tuple[TileGroup, ...]
    output: Tensor  # [rows * heads], into the groups' outputs one after another

    def to(self, device: torch.device) -> "WindowPlan":
        """The same maps and masks on a device."""
        groups = tuple(group.to(device) for group in self.groups)
        return WindowPlan(groups, self.output.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """What the layers of one forward share, by their window."""

    windows: dict[int, WindowPlan]
    batch: RowBatch
    config: ModelConfig

    def to(self, device: torch.device) -> "AttentionPlan":
        """The same plan with its maps and masks on a device."""
        windows = {window: plan.to(device) for window, plan in self.windows.items()}
        return AttentionPlan(windows, self.batch.to(device), self.config)


@dataclass(frozen=True, slots=True, eq=False)
class CachedAttention:
    """Writes a layer's new keys and values to their slots, then attends over the cache."""

    plan: AttentionPlan
    cache: KVCache

    def __call__(self, layer: int, qk: Tensor, values: Tensor) -> Tensor:
        """From qk [rows, heads + kv_heads, head_dim] and values to [rows, heads * head_dim]."""
        keys = qk[:, self.plan.config.num_heads :]
        self.cache.write(layer, self.plan.batch.slots, keys, values)
        return attend(qk, self.cache, layer, self.plan)


def attend(qk: Tensor, cache: KVCache, layer: int, plan: AttentionPlan) -> Tensor:
    """Attend qk [rows, heads + kv_heads, head_dim] over a layer: [rows, heads * head_dim]."""
    flat = qk.view(-1, qk.shape[-1])
    maps = plan.windows[plan.config.window(layer)]
    parts = []
    for group in maps.groups:
        kv = cache.read(layer, group.slots, group.gathered)
        parts.append(_attend_group(flat, kv, group))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.index_select(0, maps.output).view(len(qk), -1)


def plan_attention(batch: RowBatch, config: ModelConfig, dtype: torch.dtype) -> AttentionPlan:
    """Cut the runs into tiles, group tiles of one size and build maps and masks of `dtype`."""
    windows = sorted({*config.windows} or {0})
    plans = {window: _plan_window(batch, config, dtype, window) for window in windows}
    return AttentionPlan(plans, batch, config)


def _plan_window(
    batch: RowBatch, config: ModelConfig, dtype: torch.dtype, window: int
) -> WindowPlan:
    positions = batch.positions.numpy()
    groups, output, base = [], np.empty((len(positions), config.num_heads), np.int64), 0
    for tiles in _group(_cut(batch.runs, window)):
        group = _build_group(tiles, positions, config, dtype)
        queries = group.mask.shape[2]
        for index, tile in enumerate(tiles):
            rows = slice(tile.first, tile.first + tile.count)
            output[rows] = base + _output_map(index, tile.count, queries, config)
        groups.append(group)
        base += len(group.queries)
    return WindowPlan(tuple(groups), torch.from_numpy(output.ravel()))


def _attend_group(flat: Tensor, kv: Tensor, group: TileGroup) -> Tensor:
    """Outputs in the order [tiles, queries, kv_heads] as rows of head_dim."""
    tiles, _, queries, keys = group.mask.shape
    _, _, kv_heads, head_dim = kv.shape
    query = flat.index_select(0, group.queries).view(tiles, kv_heads, queries, head_dim)
    key, value = kv.view(tiles, keys, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
    return out.transpose(1, 2).reshape(-1, head_dim)


def _cut(runs: Iterable[Run], window: int) -> list[Tile]:
    tiles, first = [], 0
    for run in runs:
        start = run.start
        while start < run.end:
            end = min(start - start % KEY_BLOCK + KEY_BLOCK, run.end)
            tiles.append(Tile(run, first, end - start, end, window))
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
    seen = torch.from_numpy(np.array([tile.begin for tile in tiles])[:, None] + np.arange(keys))
    hidden = _hidden(torch.from_numpy(positions[rows]), seen, tiles[0].window)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return TileGroup(
        queries=torch.from_numpy(queries.ravel()),
        slots=torch.from_numpy(slots.ravel()),
        mask=mask,
        gathered=torch.empty((slots.size, 2, config.num_kv_heads, config.head_dim), dtype=dtype),
    )


def _hidden(positions: Tensor, keys: Tensor, window: int) -> Tensor:
    """Which of the keys at positions [tiles, keys] rows at [tiles, queries] do not see.

    [tiles, 1, queries, keys]
    """
    own, seen = positions[:, None, :, None], keys[:, None, None, :]
    return (seen > own) | (seen <= own - window) if window else seen > own


def _output_map(index: int, count: int, queries: int, config: ModelConfig) -> IntArray:
    """Where tile `index` of a group leaves the heads of its rows: [count, heads]."""
    kv_head, member = np.divmod(np.arange(config.num_heads), config.group)
    query = np.arange(count)[:, None] * config.group + member
    return (index * queries + query) * config.num_kv_heads + kv_head
