"""Gumbel noise as a function of (seed, position, token id): no random state anywhere.

The hash is splitmix64 (Steele, Lea and Flood 2014) in wrapping int64 arithmetic, so it is the same
on every device and in every batch.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

WEYL = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio, as signed int64
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
UNIT = 2.0**-52
TILE_HASHES = 16384  # computed at once: they stay in cache and below the page-fault limit
COARSE = 1 << 33  # what the last step of the mix can change
# Other uses than choosing the target's tokens under rule `match`: each has noise of its own.
ACCEPTING, FINISHING, DRAFTING = -1, -2, -3


def as_int64(seeds: Iterable[int]) -> Tensor:
    """Unsigned 64-bit seeds as an int64 tensor of the same bits."""
    return torch.tensor([(seed & (1 << 64) - 1) - (seed >> 63 << 64) for seed in seeds])


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The key of each (seed, position), int64 of their broadcast shape."""
    return _mix(_mix(seeds + WEYL) + positions * WEYL)


def seeds_for(use: int, seeds: Tensor) -> Tensor:
    """The seeds of another use; no position is negative, so they are the key of none."""
    return row_keys(seeds, torch.tensor(use))


def hashes(keys: Tensor, ids: Tensor) -> Tensor:
    """Uniform int64 for each (key, token id), of their broadcast shape."""
    return _mix(keys + (ids + 1) * WEYL)


def ids_above(keys: Tensor, bounds: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Rows and ids in [0, vocab) whose hash under keys [n] may reach bounds [n].

    All that do and few that do not: only the upper 31 bits of a hash are computed.
    """
    width = -(-TILE_HASHES // len(keys))
    steps = torch.arange(1, width + 1) * WEYL
    origins = keys[:, None] + torch.arange(0, vocab, width) * WEYL  # [n, tiles]
    lowest = (bounds.clamp(min=COARSE - (1 << 63)) - COARSE)[:, None]
    z = torch.empty((len(keys), width), dtype=torch.int64)
    shifted, found = torch.empty_like(z), []
    for tile, origin in enumerate(origins.unbind(1)):
        _scramble(torch.add(origin[:, None], steps, out=z), shifted)
        found.append((z >= lowest).nonzero() + torch.tensor((0, tile * width)))
    row, ids = torch.cat(found).unbind(1)
    inside = ids < vocab
    return row[inside], ids[inside]


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise in float64, of the broadcast shape of its arguments."""
    return gumbel_of(hashes(row_keys(seeds, positions), ids))


def hash_bound(noise: Tensor) -> Tensor:
    """A hash below this int64 bound gives less than `noise` [n], float64; never too high."""
    uniform = torch.exp(-torch.exp(-noise))
    scaled = (uniform - 0.5) * 2.0**64 - 2.0**20  # the slack covers float64 rounding
    return scaled.clamp_(-(2.0**63), 2.0**63 - 2.0**20).long()


def gumbel_of(hashed: Tensor) -> Tensor:
    """Noise -log(-log(u)) that grows with the hash."""
    return -torch.log(-torch.log(uniform_of(hashed)))


def uniform_of(hashed: Tensor) -> Tensor:
    """u = (hash / 2^12 + 2^51 + 1/2) / 2^52 in float64: never 0, never 1."""
    return ((hashed >> 12).double() + (2.0**51 + 0.5)) * UNIT


def _mix(z: Tensor) -> Tensor:
    z = z.clone()
    shifted = torch.empty_like(z)
    _scramble(z, shifted)
    return z ^ _shift(z, 31, shifted)


def _scramble(z: Tensor, shifted: Tensor) -> None:
    """All of the mix but its last step, which leaves the upper 31 bits alone; in place."""
    z.bitwise_xor_(_shift(z, 30, shifted)).mul_(MIX_1)
    z.bitwise_xor_(_shift(z, 27, shifted)).mul_(MIX_2)


def _shift(z: Tensor, count: int, out: Tensor) -> Tensor:
    """Logical shift right."""
    return torch.bitwise_right_shift(z, count, out=out).bitwise_and_((1 << 64 - count) - 1)
