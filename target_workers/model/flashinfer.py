"""Attention by FlashInfer: a slot is a page of one token, and a run is a request.

The kernel reads keys and values where they are: nothing is gathered and no mask is built. It takes
a request's queries for the last of its keys, which is what the rows of a run are. Not yet run on a
GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from target_workers.model.attention import Setting
from target_workers.model.batch import RowBatch
from target_workers.model.config import ModelConfig
from target_workers.model.cuda_graphs import MAX_KEYS, ROW_COUNTS, Compute, DecodeGraphs, Record
from target_workers.model.kv_cache import KVCache
from target_workers.model.layers import Attend
from target_workers.model.run import IntArray, Run

# The kernels that take every device, window and graph; what "auto" chooses may not.
BACKEND = "fa2"
LAYOUT = "NHD"  # a page is [tokens, kv_heads, head_dim]

TILE_ROWS = 128  # the largest tile of queries
SMALL_TILE_ROWS = 16  # that of one row and its group of heads
BLOCKS = 2  # at work on a processor at once
FLOAT_BYTES = 4
ALIGNMENT = 64  # what placing them may cost
LEAST_WORKSPACE = 128 << 20  # what FlashInfer recommends


class Wrapper(Protocol):
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper, as far as it is used here."""

    @property
    def plan(self) -> Callable[..., None]: ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor: ...


Library: TypeAlias = Callable[..., Wrapper]


@dataclass(frozen=True, slots=True)
class Kit:
    """What makes wrappers, and what records CUDA graphs of them; None: nothing does."""

    library: Library
    record: Record | None = None


class PagedAttention:
    """The Attention of FlashInfer."""

    name = "flashinfer"

    def __init__(self, setting: Setting, kit: Kit) -> None:
        self.setting = setting
        self._record = kit.record
        size = workspace_bytes(setting.config, _processors(setting.device))
        workspace = torch.empty(size, dtype=torch.uint8, device=setting.device)
        self._wrapper = partial(kit.library, workspace, LAYOUT, backend=BACKEND)
        self._windows = sorted({*setting.config.windows} or {0})
        self._eager = Planned(setting, {window: self._wrapper() for window in self._windows})
        self._tables: dict[int, Table] = {}

    def prepare(self, batch: RowBatch, cache: KVCache) -> tuple[RowBatch, Attend]:
        self._eager.plan(batch.runs)
        batch = batch.to(self.setting.device)
        return batch, self._eager.over(batch.slots, cache)

    def graphs(self, compute: Compute) -> DecodeGraphs | None:
        if self._record is None:
            return None
        return DecodeGraphs(compute, self.fixed, self._record, self.setting.device)

    def fixed(self, count: int) -> "Planned":
        """The same for `count` runs of one row, with plans that a CUDA graph reads anew.

        The plans of all counts are in the same memory: each is for the next replay alone.
        """
        if not self._tables:
            device = self.setting.device
            self._tables = {window: Table.empty(device) for window in self._windows}
        wrappers = {window: self._fixed(count, table) for window, table in self._tables.items()}
        return Planned(self.setting, wrappers)

    def _fixed(self, count: int, table: "Table") -> Wrapper:
        return self._wrapper(
            use_cuda_graph=True,
            qo_indptr_buf=table.queries[: count + 1],
            paged_kv_indptr_buf=table.keys[: count + 1],
            paged_kv_indices_buf=table.slots,
            paged_kv_last_page_len_buf=table.last[:count],
        )


@dataclass(slots=True, eq=False)
class Planned:
    """One wrapper for each window of the layers, planned for the same runs."""

    setting: Setting
    wrappers: dict[int, Wrapper]
    forward: int = 0

    def plan(self, runs: Sequence[Run]) -> None:
        """Set the wrappers for these runs."""
        config, dtype = self.setting.config, self.setting.dtype
        self.forward += 1
        for window, wrapper in self.wrappers.items():
            table = Table.of(runs, window)
            wrapper.plan(
                qo_indptr=table.queries,
                paged_kv_indptr=table.keys,
                paged_kv_indices=table.slots,
                paged_kv_last_page_len=table.last,
                num_qo_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim_qk=config.head_dim,
                page_size=1,
                causal=True,
                sm_scale=config.head_dim**-0.5,
                window_left=window - 1 if window else -1,  # keys before the row's own; -1: all
                q_data_type=dtype,
                kv_data_type=dtype,
                # A plan is copied from a buffer that the next one overwrites: wait for the copy.
                non_blocking=False,
            )

    def over(self, slots: Tensor, cache: KVCache) -> Attend:
        """The attention of the planned runs, whose rows are written to `slots` [rows]."""
        return partial(self._attend, self.forward, slots, cache)

    def _attend(
        self, forward: int, slots: Tensor, cache: KVCache, layer: int, qk: Tensor, values: Tensor
    ) -> Tensor:
        assert forward == self.forward, "a forward ends before the next one is planned"
        config = self.setting.config
        cache.write(layer, slots, qk[:, config.num_heads :], values)
        wrapper = self.wrappers[config.window(layer)]
        out = wrapper.run(qk[:, : config.num_heads], cache.pages(layer))
        return out.view(len(qk), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Where each run's rows and keys begin and end, and the slots of the keys; all int32."""

    queries: Tensor  # [runs + 1]
    keys: Tensor  # [runs + 1]
    slots: Tensor  # [keys of all runs]
    last: Tensor  # [runs], tokens on the last page: one

    @classmethod
    def empty(cls, device: torch.device) -> "Table":
        """Room for the largest graph."""
        rows = ROW_COUNTS[-1]
        sizes = (rows + 1, rows + 1, MAX_KEYS, rows)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))

    @classmethod
    def of(cls, runs: Sequence[Run], window: int) -> "Table":
        """The table of some runs on the CPU, without the keys that no row of a run sees."""
        parts = []
        for run in runs:
            begin = max(run.start - window + 1, 0) if window else 0
            parts.append(np.concatenate((run.history[begin:], run.slots)))
        return cls(
            queries=_ends([len(run.slots) for run in runs]),
            keys=_ends([len(part) for part in parts]),
            slots=_int32(np.concatenate(parts)),
            last=torch.ones(len(runs), dtype=torch.int32),
        )


def _ends(lengths: Sequence[int]) -> Tensor:
    return _int32(np.cumsum([0, *lengths]))


def _int32(numbers: IntArray) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))


def workspace_bytes(config: ModelConfig, processors: int) -> int:
    """Room for the float32 outputs and weights of parts of a history, summed up afterwards.

    An eager forward is cut into as many parts as there are blocks at work; a graph is laid out for
    a tile for each row.
    """
    head_bytes = (config.head_dim + 1) * FLOAT_BYTES
    eager = BLOCKS * processors * TILE_ROWS * config.group * head_bytes
    tile = SMALL_TILE_ROWS if config.group <= SMALL_TILE_ROWS else TILE_ROWS
    rows = ROW_COUNTS[-1]
    tiles = max(rows * config.group // tile + rows, BLOCKS * processors)
    graph = tiles * tile * config.num_heads * head_bytes
    return max(LEAST_WORKSPACE, max(eager, graph) + ALIGNMENT)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
