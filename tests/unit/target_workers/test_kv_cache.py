"""Slots of keys and values: writing, moving, sizes, and what int8 keeps of them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from target_workers.model.config import ModelConfig
from target_workers.model.kv_cache import KVCache, quantised
from target_workers.model.loading import DTYPES
from tests.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return ModelConfig.from_folder(make_tiny_llama(folder, 0, layers=3))


KINDS = [torch.float32, torch.bfloat16, torch.int8]


def numbered(config: ModelConfig, num_slots: int, dtype: torch.dtype) -> KVCache:
    """Slot s of layer i holds 10 i + s as keys, its negative as values and s as features."""
    cache = KVCache(config, num_slots, dtype, feature_size=5)
    slots = torch.arange(num_slots)
    cache.write_features(slots, slots[:, None].expand(-1, 5).float())
    for layer in range(config.num_layers):
        keys = (10.0 * layer + slots)[:, None, None].expand(
            -1, config.num_kv_heads, config.head_dim
        )
        cache.write(layer, slots, keys, -keys)
    return cache


def read(cache: KVCache, layer: int, slots: Tensor | None = None) -> Tensor:
    """Keys and values of a layer in float32."""
    slots = torch.arange(cache.num_slots) if slots is None else slots
    return cache.read(layer, slots, torch.empty(len(slots), *cache.layer(layer).shape[1:]))


def contents(cache: KVCache, layer: int) -> list[float]:
    keys, values = read(cache, layer).unbind(1)
    assert torch.equal(keys, -values)
    assert torch.equal(keys, keys[:, :1, :1].expand_as(keys))
    return [round(float(key), 4) for key in keys[:, 0, 0]]


def heads(config: ModelConfig, rows: int, seed: int) -> Tensor:
    """Keys and values [2, rows, kv_heads, head_dim] of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 6, (2, rows, config.num_kv_heads, 1), generator=generator)
    shape = (2, rows, config.num_kv_heads, config.head_dim)
    return torch.randn(shape, generator=generator) * sizes


@pytest.mark.parametrize("dtype", KINDS)
def test_a_new_cache_is_zero(config: ModelConfig, dtype: torch.dtype) -> None:
    cache = KVCache(config, 5, dtype)
    assert not cache.layer(2).any()
    assert not read(cache, 2).any()


@pytest.mark.parametrize("dtype", KINDS)
def test_overlapping_moves_happen_at_once(config: ModelConfig, dtype: torch.dtype) -> None:
    cache = numbered(config, 8, dtype)
    cache.move(torch.tensor([1, 2, 3, 4]), torch.tensor([2, 3, 4, 1]))
    expected = [0, 4, 1, 2, 3, 5, 6, 7]
    for layer in range(config.num_layers):
        assert contents(cache, layer) == [10 * layer + slot for slot in expected]
    assert cache.features(torch.arange(8))[:, 3].tolist() == expected


@pytest.mark.parametrize("dtype", KINDS)
def test_moving_nothing_changes_nothing(config: ModelConfig, dtype: torch.dtype) -> None:
    cache = numbered(config, 4, dtype)
    cache.move(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert contents(cache, 1) == [10, 11, 12, 13]


def test_sizes_are_counted_in_bytes(config: ModelConfig) -> None:
    assert config.token_bytes("bf16") == 2 * 3 * 2 * 16 * 2
    assert config.token_bytes("int8") == 2 * 3 * 2 * (16 + 4)
    for name, dtype in (DTYPES | {"int8": torch.int8}).items():
        cache = KVCache(config, 7, dtype)
        held = sum(cache.layer(i).nbytes for i in range(config.num_layers))
        scales = [cache.layer_scales(i) for i in range(config.num_layers)]
        held += sum(scale.nbytes for scale in scales if scale is not None)
        assert held == 7 * config.token_bytes(name)


def test_a_cache_of_another_type_than_its_model_rounds_once(config: ModelConfig) -> None:
    slots = torch.arange(6)
    for given, kept in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        keys, values = heads(config, 6, seed=1).to(given)
        cache = KVCache(config, 6, kept)
        cache.write(1, slots, keys, values)
        got = cache.read(1, slots, torch.empty(cache.layer(1).shape, dtype=given))
        expected = torch.stack((keys, values), 1).to(kept).to(given)
        assert torch.equal(got, expected)


# Int8.


def test_int8_is_off_by_half_a_step_at_most(config: ModelConfig) -> None:
    keys, values = heads(config, 200, seed=2)
    cache, slots = KVCache(config, 200, torch.int8), torch.arange(200)
    cache.write(0, slots, keys, values)
    given = torch.stack((keys, values), 1)
    largest = given.abs().amax(-1)
    scales = cache.layer_scales(0)
    assert scales is not None
    torch.testing.assert_close(scales, largest / 127, rtol=1e-6, atol=0)
    error = (read(cache, 0) - given).abs().amax(-1)
    assert (error <= scales * 0.50001).all()
    assert (error > scales * 0.4).any(), "the bound is near"
    assert torch.equal(cache.layer(0).abs().amax(-1), torch.full_like(largest, 127).char())


def test_int8_rounds_halves_to_even() -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -2.5])
    steps, scale = quantised(values.view(1, 1, -1))
    assert steps.flatten().tolist() == [127, 0, 2, 2, 0, -2, -126, -2]
    assert scale.tolist() == [[1.0]]


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_int8_takes_heads_of_any_size(value: float) -> None:
    steps, scale = quantised(torch.full((1, 1, 4), value))
    got = steps.float() * scale.unsqueeze(-1)
    torch.testing.assert_close(got, torch.full((1, 1, 4), value), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rows_int8_does_not_depend_on_its_company(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    rows = heads(config, 37, seed=3)[0].to(dtype)
    steps, scales = quantised(rows)
    for i, row in enumerate(rows.split(1)):
        alone, scale = quantised(row)
        assert torch.equal(alone[0], steps[i])
        assert torch.equal(scale[0], scales[i])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_slot_and_shows(
    config: ModelConfig, value: float, dtype: torch.dtype
) -> None:
    keys, values = heads(config, 9, seed=4)
    clean, dirty = (KVCache(config, 9, dtype) for _ in range(2))
    clean.write(0, torch.arange(9), keys, values)
    keys[4, 1, 3] = value
    dirty.write(0, torch.arange(9), keys, values)
    got, expected = read(dirty, 0), read(clean, 0)
    assert not got[4, 0, 1].isfinite().all()
    got[4, 0, 1] = expected[4, 0, 1]
    assert torch.equal(got, expected)
    dirty.write(0, torch.tensor([4]), keys[:1], values[:1])
    assert read(dirty, 0).isfinite().all()


# Features.


def test_features_are_kept_beside_the_rows(config: ModelConfig) -> None:
    cache = KVCache(config, 6, torch.int8, feature_size=8)
    assert (cache.feature_size, cache.features(torch.arange(6)).any()) == (8, False)
    given = torch.randn(3, 8)
    cache.write_features(torch.tensor([4, 0, 2]), given)
    got = cache.features(torch.tensor([0, 1, 4]))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[[2, 0]], given[[0, 1]].bfloat16())
    assert not got[1].any()


def test_a_cache_without_features_has_none(config: ModelConfig) -> None:
    cache = KVCache(config, 6, torch.bfloat16)
    cache.move(torch.tensor([1]), torch.tensor([2]))
    assert cache.features(torch.arange(6)).shape == (6, 0)
