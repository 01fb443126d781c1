"""One transformer block over packed weights, as a row of kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from target_workers.model.batch import RowBatch
from target_workers.model.config import ModelConfig
from target_workers.model.layers import Reduce
from target_workers.model.native.attention import attend
from target_workers.model.native.chunk import Cached, Tiles
from target_workers.model.native.elementwise import add_and_norm
from target_workers.model.native.linear import Packed, gated, linear
from target_workers.model.native.place import Heads, place
from target_workers.model.run import Run

Array = NDArray[Any]

TILE_QUERIES = 24  # rows times query heads of one key head


def even(size: int) -> int:
    """So many inputs are taken for `size`, in pairs."""
    return size + size % 2


class Norm(NamedTuple):
    """Weight [hidden] and epsilon."""

    weight: Array
    eps: float


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything a block multiplies with."""

    attention_norm: Norm
    qkv: Packed
    heads: Heads
    out: Packed
    mlp_norm: Norm
    gate_up: Packed
    down: Packed


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of one forward and what they are computed in; `x` is their residual stream.

    `delta` is what the last half block adds to x, not yet added.
    """

    positions: Array  # [rows]
    slots: Array  # [rows]
    tiles: Tiles
    threads: int
    x: Array  # [rows, hidden]
    delta: Array  # [rows, hidden]
    normed: Array  # [rows, hidden], as the linear maps take it
    qkv: Array  # [rows, (heads + 2 kv_heads) * head_dim]
    queries: Array  # [rows, heads, head_dim]
    attended: Array  # [rows, heads * head_dim]
    inner: Array  # [rows, intermediate], an even number


@dataclass(frozen=True, slots=True)
class Kind:
    """Whether linear maps, and queries with keys, are multiplied in pairs of bfloat16."""

    in_pairs: bool
    keys_in_pairs: bool


def make_rows(x: Array, batch: RowBatch, config: ModelConfig, kind: Kind, threads: int) -> Rows:
    """Room for the rows of a batch, whose embeddings x [rows, hidden] are used up."""
    rows, size = len(x), config.head_dim
    taken = np.uint16 if kind.in_pairs else np.float32
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return Rows(
        positions=batch.positions.numpy(),
        slots=batch.slots.numpy(),
        tiles=make_tiles(batch.runs, config.group),
        threads=threads,
        x=x,
        delta=np.zeros_like(x),
        normed=np.empty(x.shape, taken),
        qkv=np.empty((rows, (heads + 2 * kv_heads) * size), np.float32),
        queries=np.empty((rows, heads, size), np.uint16 if kind.keys_in_pairs else np.float32),
        attended=np.empty((rows, heads * size), taken),
        inner=np.empty((rows, even(config.intermediate_size)), taken),
    )


def make_tiles(runs: Sequence[Run], group: int) -> Tiles:
    """Cut runs into tiles of few enough rows that their queries are attended together."""
    most = max(1, TILE_QUERIES // group)
    counts = np.array([len(run.tokens) for run in runs])
    starts = np.array([run.start for run in runs])
    tiles = -(-counts // most)
    run_of = np.repeat(np.arange(len(runs)), tiles)
    offset = (np.arange(len(run_of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
    ends = starts + counts
    return Tiles(
        first=(np.cumsum(counts) - counts)[run_of] + offset,
        rows=np.minimum(counts[run_of] - offset, most),
        start=starts[run_of] + offset,
        base=(np.cumsum(ends) - ends)[run_of],
        slots=np.concatenate([part for run in runs for part in (run.history, run.slots)]),
    )


def run_block(rows: Rows, weights: Weights, cached: Cached, reduce: Reduce) -> None:
    """Take the rows through a block; what its second half adds to x is left in `delta`.

    `reduce` gives the sums of all ranks for those of this one, float32 [rows, hidden].
    """
    threads, normed, delta = rows.threads, rows.normed, rows.delta
    add_and_norm(rows.x, delta, *weights.attention_norm, normed, threads)
    linear(weights.qkv, normed, rows.qkv, threads)
    place(rows.qkv, rows.positions, rows.slots, weights.heads, cached, rows.queries, threads)
    attend(rows.queries, cached, rows.tiles, rows.attended, threads)
    linear(weights.out, rows.attended, delta, threads)
    summed = reduce(torch.from_numpy(delta)).numpy()
    add_and_norm(rows.x, summed, *weights.mlp_norm, normed, threads)
    gated(weights.gate_up, normed, rows.inner, threads)
    linear(weights.down, rows.inner, delta, threads)
    delta[...] = reduce(torch.from_numpy(delta)).numpy()
