"""One chunk of keys: its weights and weighted values for the queries of a few rows and one head."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_workers.model.native.elementwise import exp
from target_workers.model.native.jit import kernel, reordered
from target_workers.model.native.llvm import LANES, PANEL
from target_workers.model.native.tile import DOUBLE_ROWS, TILE_ROWS, dot_panels, dot_values, turn
from target_workers.model.native.vector import narrow, ranked, values_a_step, widen

Array = NDArray[Any]

CHUNK = 256  # positions
NOTHING = np.float32(-np.inf)


class Tiles(NamedTuple):
    """Up to so many consecutive rows of one path; every array but `slots` has one entry a tile.

    Row i of a tile is row `first + i` of the batch, at position `start + i`. The slot of position p
    is `slots[base + p]`.
    """

    first: Array
    rows: Array
    start: Array
    base: Array
    slots: Array


class Cached(NamedTuple):
    """A layer's keys and values [slots, 2, kv_heads, head_dim], and the scales of int8 ones.

    A row sees `window` positions up to its own (0: all).
    """

    rows: Array
    scales: Array
    window: int


class Partial(NamedTuple):
    """Partial results by place: per query the largest score, the sum, the weighted values."""

    largest: Array  # [places, queries]
    total: Array  # [places, queries]
    values: Array  # [places, queries, head_dim]


class Space(NamedTuple):
    """What one thread computes a chunk in."""

    queries: Array  # [queries, head_dim], of the type that is multiplied
    offsets: Array  # [CHUNK], of the chunk's keys in the cache
    keys: Array  # [head_dim * CHUNK], of that type
    scores: Array  # [queries, CHUNK]
    weights: Array  # [queries, CHUNK], of that type
    sums: Array  # [queries, whole panels of head_dim]


@kernel
def make_space(rows: int, queries: Array) -> Space:
    size = queries.shape[2]
    padded = -(-size // PANEL) * PANEL
    return Space(
        np.empty((rows, size), queries.dtype),
        np.empty(CHUNK, np.int64),
        np.zeros(size * CHUNK, queries.dtype),
        np.empty((rows, CHUNK), np.float32),
        np.zeros((rows, CHUNK), queries.dtype),
        np.empty((rows, padded), np.float32),
    )


@kernel
def _load(
    cached: Cached, tiles: Tiles, tile: int, head: int, low: int, high: int, space: Space
) -> None:
    """Find the keys of positions [low, high) in the cache and lay them out in panels."""
    size = cached.rows.shape[3]
    flat = cached.rows.reshape(-1)
    per_part = cached.rows.shape[2] * size
    slots, offsets, base, count = tiles.slots, space.offsets, tiles.base[tile] + low, high - low
    for j in range(count):
        offsets[j] = slots[base + j] * 2 * per_part + head * size
    for j in range(count, -(-count // LANES) * LANES):
        offsets[j] = offsets[0]
    each = values_a_step(space.keys)
    for j in range(0, count, LANES):
        for d in range(0, size // each, LANES):
            turn(flat, offsets, j, d * each, space.keys, d * CHUNK + j, CHUNK)


@reordered
def _weigh(scores: Array, weights: Array, q: int, begin: int, end: int, count: int) -> Any:
    """Weights relative to the largest from the scores of query q; that score, and their sum.

    It sees [begin, end) of the `count` keys: of none, the sum is 0.
    """
    seen, kept = scores[q, begin:end], weights[q, begin:end]
    # Found as whole numbers: their order lets the compiler take many at once.
    highest = ranked(NOTHING)
    for j in range(len(seen)):
        highest = max(highest, ranked(seen[j]))
    largest = ranked(highest)
    total = np.float32(0)
    for j in range(len(seen)):
        weight = narrow(exp(seen[j] - largest), weights)
        kept[j] = weight
        total += widen(weight)
    weights[q, :begin] = 0
    weights[q, end : count + count % 2] = 0
    return largest, total


@kernel
def _scale_scores(
    cached: Cached,
    part: int,
    head: int,
    tiles: Tiles,
    at: int,
    scores: Array,
    queries: int,
    count: int,
) -> None:
    """Multiply scores or weights by the scales of int8 keys or values."""
    for j in range(count):
        scale = cached.scales[tiles.slots[at + j], part, head]
        for q in range(queries):
            scores[q, j] *= scale


@kernel
def _score(queries: int, size: int, keys: int, space: Space) -> None:
    """Every query times every key."""
    each = values_a_step(space.keys)
    for first in range(0, queries, TILE_ROWS):
        some = min(TILE_ROWS, queries - first)
        panels = 2 if some <= DOUBLE_ROWS else 1
        for j in range(0, keys, PANEL * panels):
            dot_panels(
                space.keys, j * each, PANEL * each, CHUNK * each, space.queries, first, some,
                size // each, 2 * panels, space.scores, first, j,
            )  # fmt: skip


@kernel
def _add_values(queries: int, cached: Cached, keys: int, space: Space) -> None:
    """Every query's weights times the values, which are taken from where they lie."""
    flat, size = cached.rows.reshape(-1), cached.rows.shape[3]
    per_part, each = cached.rows.shape[2] * size, values_a_step(space.keys)
    for first in range(0, queries, TILE_ROWS):
        some = min(TILE_ROWS, queries - first)
        most = 4 if some <= DOUBLE_ROWS else 2
        d = 0
        while d < size:
            left = (size - d) // LANES
            vectors = most if left >= most else 2 if left >= 2 else 1
            dot_values(
                flat, per_part + d, 0, space.offsets, space.weights, first, some,
                (keys + each - 1) // each, vectors, space.sums, first, d,
            )  # fmt: skip
            d += vectors * LANES


@kernel
def weigh_chunk(
    cached: Cached,
    tiles: Tiles,
    tile: int,
    head: int,
    chunk: int,
    group: int,
    space: Space,
    partial: Partial,
    place: int,
) -> None:
    """The partial results of a tile's queries of one key head over one chunk, left at `place`.

    Query i * group + g is of row i; one that sees nothing of the chunk has the sum 0.
    """
    count, start, window = tiles.rows[tile], tiles.start[tile], cached.window
    low, high = chunk * CHUNK, min((chunk + 1) * CHUNK, start + count)
    if window > 0:
        # An even number of keys is left out, so that the same keys make a pair whoever looks.
        low = max(low, (start + 1 - window) // 2 * 2)
    queries, keys, size = count * group, high - low, cached.rows.shape[3]
    scores, weights, at = space.scores, space.weights, tiles.base[tile] + low
    _load(cached, tiles, tile, head, low, high, space)
    _score(queries, size, keys, space)
    if len(cached.scales) > 0:
        _scale_scores(cached, 0, head, tiles, at, scores, queries, keys)
    for q in range(queries):
        own = start + q // group
        seen_to = min(high, own + 1) - low
        seen_from = 0 if window == 0 else max(low, own + 1 - window) - low
        seen_to = max(seen_from, seen_to)
        largest, total = _weigh(scores, weights, q, seen_from, seen_to, keys)
        partial.largest[place, q], partial.total[place, q] = largest, total
    if len(cached.scales) > 0:
        _scale_scores(cached, 1, head, tiles, at, weights, queries, keys)
    _add_values(queries, cached, keys, space)
    for q in range(queries):
        for d in range(size):
            partial.values[place, q, d] = space.sums[q, d]
