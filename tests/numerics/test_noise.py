"""The noise is a function of (seed, position, id) alone, and it is Gumbel noise."""

import math

import torch

from target_workers.model.noise import (
    as_int64,
    gumbel,
    gumbel_of,
    hash_bound,
    hashes,
    ids_above,
    row_keys,
)

MASK = (1 << 64) - 1
WEYL = 0x9E3779B97F4A7C15
SEEDS = [0, 1, 12345, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0xDEADBEEFCAFEF00D]
POSITIONS = [0, 1, 7, 511, 131071]
IDS = [0, 1, 2, 63, 49151, 262207]


def mix(z: int) -> int:
    """The finaliser of splitmix64 on Python integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def reference_hash(seed: int, position: int, token: int) -> int:
    key = mix(mix(seed + WEYL & MASK) + position * WEYL & MASK)
    return mix(key + (token + 1) * WEYL & MASK)


def reference_gumbel(seed: int, position: int, token: int) -> float:
    hashed = reference_hash(seed, position, token)
    signed = hashed - (hashed >> 63 << 64)
    return -math.log(-math.log(((signed >> 12) + (1 << 51) + 0.5) / (1 << 52)))


def test_splitmix64_gives_its_published_first_values() -> None:
    state, values = 1234567, []
    for _ in range(3):
        state = state + WEYL & MASK
        values.append(mix(state))
    assert values == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_hashes_and_noise_agree_with_plain_integers() -> None:
    seeds, positions, ids = as_int64(SEEDS), torch.tensor(POSITIONS), torch.tensor(IDS)
    hashed = hashes(row_keys(seeds[:, None], positions)[:, :, None], ids)
    noise = gumbel(seeds[:, None, None], positions[:, None], ids)
    for s, seed in enumerate(SEEDS):
        for p, position in enumerate(POSITIONS):
            for t, token in enumerate(IDS):
                assert int(hashed[s, p, t]) & MASK == reference_hash(seed, position, token)
                expected = reference_gumbel(seed, position, token)
                assert math.isclose(float(noise[s, p, t]), expected, rel_tol=1e-13, abs_tol=1e-13)


def test_noise_has_the_same_bits_in_every_batch() -> None:
    seeds, positions = as_int64(range(6)), torch.arange(100, 106)
    ids = torch.arange(3001)
    together = gumbel(seeds[:, None], positions[:, None], ids)
    for row in range(6):
        for begin, end in ((0, 1), (5, 18), (2950, 3001)):
            alone = gumbel(seeds[row], positions[row], ids[begin:end])
            assert torch.equal(alone, together[row, begin:end])


def test_the_extreme_hashes_give_finite_noise() -> None:
    extremes = torch.tensor([-(1 << 63), (1 << 63) - 1])
    noise = gumbel_of(extremes)
    assert noise.isfinite().all()
    assert noise[0] < -3.5 and noise[1] > 36


def test_noise_has_the_moments_of_a_standard_gumbel() -> None:
    noise = gumbel(torch.tensor(3), torch.arange(200)[:, None], torch.arange(5000))
    assert abs(float(noise.mean()) - 0.5772156649) < 0.005
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.01


def test_neighbouring_seeds_positions_and_ids_are_unrelated() -> None:
    base = gumbel(torch.tensor(8), torch.arange(100)[:, None], torch.arange(1000))
    others = (
        gumbel(torch.tensor(9), torch.arange(100)[:, None], torch.arange(1000)),
        gumbel(torch.tensor(8), torch.arange(1, 101)[:, None], torch.arange(1000)),
        gumbel(torch.tensor(8), torch.arange(100)[:, None], torch.arange(1, 1001)),
    )
    for other in others:
        pair = torch.stack((base.flatten(), other.flatten()))
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.015


def test_no_id_with_enough_noise_is_missed() -> None:
    keys = row_keys(as_int64(SEEDS), torch.arange(len(SEEDS)))
    wanted = torch.tensor([-40.0, -3.0, 0.0, 2.0, 7.0, 9.0, 50.0], dtype=torch.float64)
    noise = gumbel_of(hashes(keys[:, None], torch.arange(40000)))
    row, ids = ids_above(keys, hash_bound(wanted), 40000)
    found = torch.zeros(noise.shape, dtype=torch.bool)
    found[row, ids] = True
    enough = noise >= wanted[:, None]
    assert found[enough].all()
    assert int((found & ~enough).sum()) <= 3, "the bound lets too many through"
