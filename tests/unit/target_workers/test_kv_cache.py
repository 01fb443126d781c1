"""Slots of keys and values: writing, moving, sizes."""

from pathlib import Path

import pytest
import torch

from target_workers.model.config import ModelConfig
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import DTYPES
from tests.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return ModelConfig.from_folder(make_tiny_llama(folder, 0, layers=3))


def numbered(config: ModelConfig, num_slots: int) -> KVCache:
    """Slot s of layer i holds 100 i + s as keys and its negative as values."""
    cache = KVCache(config, num_slots, torch.float32)
    slots = torch.arange(num_slots)
    for layer in range(config.num_layers):
        keys = (100.0 * layer + slots)[:, None, None].expand(
            -1, config.num_kv_heads, config.head_dim
        )
        cache.write(layer, slots, keys, -keys)
    return cache


def contents(cache: KVCache, layer: int) -> list[float]:
    keys, values = cache.layer(layer).unbind(1)
    assert torch.equal(keys, -values)
    assert torch.equal(keys, keys[:, :1, :1].expand_as(keys))
    return [float(key) for key in keys[:, 0, 0]]


def test_a_new_cache_is_zero(config: ModelConfig) -> None:
    cache = KVCache(config, 5, torch.bfloat16)
    assert not cache.layer(2).any()


def test_overlapping_moves_happen_at_once(config: ModelConfig) -> None:
    cache = numbered(config, 8)
    cache.move(torch.tensor([1, 2, 3, 4]), torch.tensor([2, 3, 4, 1]))
    for layer in range(config.num_layers):
        expected = [0, 4, 1, 2, 3, 5, 6, 7]
        assert contents(cache, layer) == [100 * layer + slot for slot in expected]


def test_moving_nothing_changes_nothing(config: ModelConfig) -> None:
    cache = numbered(config, 4)
    cache.move(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert contents(cache, 1) == [100, 101, 102, 103]


def test_sizes_are_counted_in_bytes(config: ModelConfig) -> None:
    assert config.token_bytes("bf16") == 2 * 3 * 2 * 16 * 2
    for name, dtype in DTYPES.items():
        cache = KVCache(config, 7, dtype)
        held = sum(cache.layer(i).nbytes for i in range(config.num_layers))
        assert held == 7 * config.token_bytes(name)
