"""What is planned for a decoder is what it takes."""

from pathlib import Path

import pytest
import torch

from target_workers.model.config import ModelConfig
from target_workers.model.footprint import Footprint
from target_workers.model.layers import Linear
from target_workers.model.loading import Part, load_reference
from target_workers.model.shard import Shard, local_config, portion
from tests.tiny import make_tiny


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_planned_weights_are_those_that_are_loaded(
    tmp_path: Path, size: int, *, tied: bool
) -> None:
    folder = make_tiny(tmp_path, 1, "Qwen3", tie_word_embeddings=tied, num_key_value_heads=4)
    shape = ModelConfig.from_folder(folder)
    for rank in range(size):
        shard = Shard(rank, size)
        decoder = load_reference(folder, dtype=torch.bfloat16, part=Part(shard))
        weights = [m for m in decoder.modules() if isinstance(m, Linear)]
        angles = 2 * (decoder.rotary.cos.nbytes + decoder.rotary.sin.nbytes)  # float32 in kernels
        held = decoder.embedding.nbytes + angles + sum(w.weight.nbytes for w in weights)
        rows = len(portion(shape, shard).vocab)
        assert Footprint(local_config(shape, shard), "bf16", head_rows=rows).weights_bytes == held


def test_a_footprint_counts_what_the_types_take(tmp_path: Path) -> None:
    shape = ModelConfig.from_folder(make_tiny(tmp_path, 1, "Llama"))
    plain = Footprint(shape, "bf16", on_cpu=False)
    narrow = Footprint(shape, "bf16", "int8", feature_size=64, on_cpu=False)
    values = 2 * 2 * 2 * 16  # keys and values of a token in both layers
    assert (plain.kv_bytes, plain.copy_bytes, plain.feature_bytes) == (values * 2, values, 0)
    assert narrow.kv_bytes == plain.int8_bytes == values + 4 * values // 16
    assert (narrow.copy_bytes, narrow.feature_bytes) == (values // 2 * 6, 128)
    assert narrow.weights_bytes == plain.weights_bytes
    more = [plain.work_bytes(rows, 1000) for rows in (1, 100, 200)]
    assert more == sorted(more)
    assert plain.work_bytes(100, 1000) < plain.work_bytes(100, 2000)


def test_kernels_copy_no_keys_and_keep_int8_weights_as_they_are(tmp_path: Path) -> None:
    shape = ModelConfig.from_folder(make_tiny(tmp_path, 1, "Llama"))
    plain, narrow = Footprint(shape, "bf16"), Footprint(shape, "bf16", weight_dtype="int8")
    assert plain.has_kernels and not Footprint(shape, "fp64").has_kernels
    assert plain.copy_bytes == 0
    assert plain.work_bytes(100, 1000) == plain.work_bytes(100, 2000)
    kept = shape.vocab_size * shape.hidden_size * 2 + 2 * shape.max_context * shape.head_dim * 4
    assert 2 * (narrow.weights_bytes - kept) == plain.weights_bytes - kept
