"""Attention over slots of the cache, without a copy of the history.

The keys of a row are taken in chunks of fixed absolute positions. A chunk gives a partial result
(largest score, sum, weighted values), and partial results are merged in the order of positions:
what a row gets depends neither on the rows beside it nor on who computed which chunk.
"""

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from target_workers.model.native.chunk import (
    CHUNK,
    Cached,
    Partial,
    Space,
    Tiles,
    make_space,
    weigh_chunk,
)
from target_workers.model.native.elementwise import exp
from target_workers.model.native.jit import fused, kernel, parallel
from target_workers.model.native.vector import narrow, ranked

Array = NDArray[Any]

TASKS_PER_THREAD = 4  # with fewer than this, threads share out chunks instead


@kernel
def _span(tiles: Tiles, tile: int, window: int) -> tuple[int, int]:
    """The first chunk that a tile sees anything of, and the one after the last."""
    seen_from = 0 if window == 0 else max(0, tiles.start[tile] + 1 - window)
    return seen_from // CHUNK, (tiles.start[tile] + tiles.rows[tile] - 1) // CHUNK + 1


@fused
def _merge(partial: Partial, into: int, place: int, queries: int) -> None:
    """Add the partial results of a later chunk to what the earlier ones gave."""
    for q in range(queries):
        if partial.total[place, q] == 0:
            continue
        before, now = partial.largest[into, q], partial.largest[place, q]
        largest = ranked(max(ranked(before), ranked(now)))
        old, new = exp(before - largest), exp(now - largest)
        partial.largest[into, q] = largest
        partial.total[into, q] = partial.total[into, q] * old + partial.total[place, q] * new
        for d in range(partial.values.shape[2]):
            added = partial.values[place, q, d] * new
            partial.values[into, q, d] = partial.values[into, q, d] * old + added


@kernel
def _store(
    partial: Partial, place: int, tiles: Tiles, tile: int, head: int, group: int, out: Array
) -> None:
    """Write the finished results of a tile's queries of one key head."""
    size = partial.values.shape[2]
    for i in range(tiles.rows[tile]):
        row = tiles.first[tile] + i
        for g in range(group):
            scale = np.float32(1) / partial.total[place, i * group + g]
            for d in range(size):
                value = partial.values[place, i * group + g, d] * scale
                out[row, (head * group + g) * size + d] = narrow(value, out)


@kernel
def _gather(queries: Array, tiles: Tiles, tile: int, head: int, group: int, space: Space) -> None:
    """Lay the queries of a tile and key head side by side."""
    for i in range(tiles.rows[tile]):
        for g in range(group):
            for d in range(queries.shape[2]):
                value = queries[tiles.first[tile] + i, head * group + g, d]
                space.queries[i * group + g, d] = value


@kernel
def _most(tiles: Tiles, window: int) -> tuple[int, int]:
    """The most rows that a tile has, and the most chunks that one sees."""
    rows, chunks = 1, 1
    for tile in range(len(tiles.rows)):
        first, end = _span(tiles, tile, window)
        rows, chunks = max(rows, tiles.rows[tile]), max(chunks, end - first)
    return rows, chunks


@kernel
def _work(
    queries: Array,
    cached: Cached,
    tiles: Tiles,
    partial: Partial,
    pieces: int,
    most: int,
    thread: int,
    threads: int,
) -> None:
    """The chunks of a thread: of every task, or of every piece of one, one after the other."""
    kv_heads, tasks = cached.rows.shape[2], len(tiles.first) * cached.rows.shape[2]
    group = queries.shape[1] // kv_heads
    space, spare = make_space(most, queries), tasks * pieces + thread
    for piece in range(thread, tasks * pieces, threads):
        task, part = piece % tasks, piece // tasks
        tile, head = task // kv_heads, task % kv_heads
        first, end = _span(tiles, tile, cached.window)
        if pieces > 1:
            first += part
            end = min(end, first + 1)
        _gather(queries, tiles, tile, head, group, space)
        for chunk in range(first, end):
            place = piece if chunk == first else spare
            weigh_chunk(cached, tiles, tile, head, chunk, group, space, partial, place)
            if chunk > first:
                _merge(partial, piece, place, tiles.rows[tile] * group)


@kernel
def _finish(
    partial: Partial,
    tiles: Tiles,
    cached: Cached,
    pieces: int,
    group: int,
    out: Array,
    thread: int,
    threads: int,
) -> None:
    """Merge the chunks of every task of a thread, in order, and write the results."""
    kv_heads = cached.rows.shape[2]
    tasks = len(tiles.first) * kv_heads
    for task in range(thread, tasks, threads):
        tile, head = task // kv_heads, task % kv_heads
        first, end = _span(tiles, tile, cached.window)
        for part in range(1, min(pieces, end - first)):
            _merge(partial, task, part * tasks + task, tiles.rows[tile] * group)
        _store(partial, task, tiles, tile, head, group, out)


@parallel
def attend(queries: Array, cached: Cached, tiles: Tiles, out: Array, threads: int) -> None:
    """out [rows, heads * head_dim] from scaled queries [rows, heads, head_dim] in float32.

    A task is a tile in one key head. Threads take whole tasks; if there are few, chunk by chunk.
    """
    kv_heads, size = cached.rows.shape[2], cached.rows.shape[3]
    group, tasks = queries.shape[1] // kv_heads, len(tiles.first) * kv_heads
    rows, chunks = _most(tiles, cached.window)
    pieces = chunks if tasks < TASKS_PER_THREAD * threads else 1
    largest = np.empty((tasks * pieces + threads, rows * group), np.float32)
    total = np.empty((tasks * pieces + threads, rows * group), np.float32)
    values = np.empty((tasks * pieces + threads, rows * group, size), np.float32)
    for thread in prange(threads):
        partial = Partial(largest, total, values)  # one made outside is unknown in here
        _work(queries, cached, tiles, partial, pieces, rows * group, thread, threads)
    if tasks < TASKS_PER_THREAD * threads:
        _finish(Partial(largest, total, values), tiles, cached, pieces, group, out, 0, 1)
    else:
        for thread in prange(threads):
            partial = Partial(largest, total, values)
            _finish(partial, tiles, cached, pieces, group, out, thread, threads)
