"""From the fused projection to attention: norm of heads, rotation, new keys and values cached."""

from typing import Any, NamedTuple

import numpy as np
from numba import prange
from numpy.typing import NDArray

from target_workers.model import kv_cache
from target_workers.model.native.chunk import Cached
from target_workers.model.native.elementwise import PARALLEL_ROWS
from target_workers.model.native.jit import fused, kernel, parallel, reordered
from target_workers.model.native.vector import narrow, ranked, whole

Array = NDArray[Any]

INT8_MOST = np.float32(kv_cache.INT8_MOST)
LEAST_HEAD = np.float32(kv_cache.LEAST_HEAD)


class Heads(NamedTuple):
    """What is done to the heads of a row: weights of their norm [heads + kv_heads, head_dim] or
    none, its epsilon, cosines and signed sines by position, and the factor on queries."""

    weight: Array
    eps: float
    cos: Array  # [positions, head_dim]
    sin: Array
    scale: float


@reordered
def _norm_head(row: Array, at: int, size: int, weight: Array, head: int, eps: float) -> None:
    total = np.float32(0)
    for d in range(size):
        total += row[at + d] * row[at + d]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(eps))
    for d in range(size):
        row[at + d] *= scale * weight[head, d]


@fused
def _rotate(row: Array, at: int, size: int, cos: Array, sin: Array, position: int) -> None:
    """Element i pairs with i + size / 2."""
    half = size // 2
    for d in range(half):
        low, high = row[at + d], row[at + half + d]
        row[at + d] = low * cos[position, d] + high * sin[position, d]
        row[at + half + d] = high * cos[position, half + d] + low * sin[position, half + d]


@kernel
def _write(row: Array, at: int, cached: Cached, slot: int, part: int, head: int) -> None:
    """Store one key or value; int8 ones with the scale that their largest element sets."""
    size = cached.rows.shape[3]
    if len(cached.scales) == 0:
        for d in range(size):
            cached.rows[slot, part, head, d] = narrow(row[at + d], cached.rows)
        return
    # As whole numbers, so that a NaN is the largest; it then is the scale, and all of the head.
    highest = ranked(LEAST_HEAD)
    for d in range(size):
        highest = max(highest, ranked(abs(row[at + d])))
    scale = ranked(highest) / INT8_MOST
    finite = scale < np.inf
    cached.scales[slot, part, head] = scale if finite else np.float32(np.nan)
    for d in range(size):
        step = whole(row[at + d] / scale) if finite else np.float32(0)
        cached.rows[slot, part, head, d] = narrow(step, cached.rows)


@kernel
def _place_row(
    row: Array, position: int, slot: int, heads: Heads, cached: Cached, queries: Array, to: int
) -> None:
    kv_heads, size, num_heads = cached.rows.shape[2], cached.rows.shape[3], queries.shape[1]
    for head in range(num_heads + kv_heads):
        if len(heads.weight) > 0:
            _norm_head(row, head * size, size, heads.weight, head, heads.eps)
        _rotate(row, head * size, size, heads.cos, heads.sin, position)
    for head in range(num_heads):
        for d in range(size):
            queries[to, head, d] = narrow(row[head * size + d] * np.float32(heads.scale), queries)
    for head in range(kv_heads):
        _write(row, (num_heads + head) * size, cached, slot, 0, head)
        _write(row, (num_heads + kv_heads + head) * size, cached, slot, 1, head)


@kernel
def _place_rows(
    qkv: Array,
    positions: Array,
    slots: Array,
    heads: Heads,
    cached: Cached,
    queries: Array,
    begin: int,
    end: int,
) -> None:
    for r in range(begin, end):
        _place_row(qkv[r], positions[r], slots[r], heads, cached, queries, r)


@parallel
def place(
    qkv: Array,
    positions: Array,
    slots: Array,
    heads: Heads,
    cached: Cached,
    queries: Array,
    threads: int,
) -> None:
    """Finish qkv [rows, (heads + 2 kv_heads) * head_dim] in place: keys and values go to `slots`,
    scaled queries to `queries` [rows, heads, head_dim]."""
    rows = len(qkv)
    if rows < PARALLEL_ROWS:
        _place_rows(qkv, positions, slots, heads, cached, queries, 0, rows)
    else:
        for thread in prange(threads):
            begin, end = rows * thread // threads, rows * (thread + 1) // threads
            _place_rows(qkv, positions, slots, heads, cached, queries, begin, end)
