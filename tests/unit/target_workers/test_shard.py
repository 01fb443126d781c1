"""Every part of a model is held by a rank, and what cannot be split is refused by name."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from target_workers.model.checkpoint import Checkpoint
from target_workers.model.config import ModelConfig, ModelError, RopeConfig
from target_workers.model.decoder import TorchDecoder
from target_workers.model.loading import Part, load_decoder, load_reference
from target_workers.model.shard import Portion, Shard, local_config, portion
from tests.tiny import make_tiny

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=8192,
    norm_eps=1e-5,
    rope=RopeConfig(),
    tied=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_tokens=(2,),
)
TINY = replace(SMOLLM2, num_heads=4, num_kv_heads=2, vocab_size=333, intermediate_size=176)


def portions(config: ModelConfig, size: int) -> list[Portion]:
    return [portion(config, Shard(rank, size)) for rank in range(size)]


def test_whole_groups_are_split_unevenly() -> None:
    first, second = portions(SMOLLM2, 2)
    assert (first.heads, first.kv_heads) == (range(6), range(2))
    assert (second.heads, second.kv_heads) == (range(6, 9), range(2, 3))


def test_more_ranks_than_groups_share_a_groups_keys_and_split_its_heads() -> None:
    assert [p.heads for p in portions(TINY, 4)] == [range(i, i + 1) for i in range(4)]
    assert [p.kv_heads for p in portions(TINY, 4)] == [range(1)] * 2 + [range(1, 2)] * 2
    assert [p.heads for p in portions(SMOLLM2, 4)] == [
        range(2),
        range(2, 3),
        range(3, 6),
        range(6, 9),
    ]


@pytest.mark.parametrize("config", [SMOLLM2, TINY, replace(SMOLLM2, num_heads=32, num_kv_heads=8)])
@pytest.mark.parametrize("size", range(1, 10))
def test_every_part_has_its_ranks(config: ModelConfig, size: int) -> None:
    if size > config.num_heads:
        return
    held = portions(config, size)
    assert [*chain.from_iterable(p.heads for p in held)] == [*range(config.num_heads)]
    assert [*chain.from_iterable(p.inner for p in held)] == [*range(config.intermediate_size)]
    assert [*chain.from_iterable(p.vocab for p in held)] == [*range(config.vocab_size)]
    for rank, p in enumerate(held):
        assert [h // config.group for h in (p.heads[0], p.heads[-1])] == [
            p.kv_heads[0],
            p.kv_heads[-1],
        ]
        assert all(edge % 16 == 0 for edge in (p.inner.start, p.vocab.start)), "whole vectors"
        local = local_config(config, Shard(rank, size))
        assert local.num_heads == local.group * local.num_kv_heads
        assert local.vocab_size == config.vocab_size


def test_ranks_that_could_hold_nothing_are_refused() -> None:
    with pytest.raises(ModelError, match=r"10 ranks cannot share 9 attention heads; set target.tp"):
        portion(SMOLLM2, Shard(0, 10))
    narrow = replace(SMOLLM2, intermediate_size=32)
    with pytest.raises(ModelError, match="4 ranks cannot share 32 columns of the MLP"):
        portion(narrow, Shard(3, 4))


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_is_one_of_the_ranks(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        Shard(rank, size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    biased = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    return make_tiny(tmp_path, 3, "Llama", **biased)


def split_up(decoder: TorchDecoder) -> dict[str, tuple[Tensor, int]]:
    """Everything that is split between ranks, and the dimension along which it is."""
    found = {"head": (decoder.head.weight, 0)}
    config = decoder.config
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i, block in enumerate(decoder.blocks):
        for name, linear, sizes in (
            ("qkv", block.qkv, [heads, kv_heads, kv_heads]),
            ("gate_up", block.gate_up, [config.intermediate_size] * 2),
        ):
            parts = zip(linear.weight.split(sizes), linear.bias.split(sizes), strict=True)
            for j, (weight, bias) in enumerate(parts):
                found |= {f"{i} {name} {j}": (weight, 0), f"{i} {name} bias {j}": (bias, 0)}
        found |= {f"{i} out": (block.out.weight, 1), f"{i} down": (block.down.weight, 1)}
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_the_slices_of_all_ranks_make_the_whole(folder: Path, size: int) -> None:
    shards = [Shard(rank, size) for rank in range(size)]
    whole = load_reference(folder, dtype=torch.float64)
    decoders = [load_reference(folder, dtype=torch.float64, part=Part(shard)) for shard in shards]
    parts = [split_up(decoder) for decoder in decoders]
    for name, (expected, dim) in split_up(whole).items():
        # With four ranks, two in a row hold the keys and values of the same group.
        step = 2 if size == 4 and name.split()[1:2] == ["qkv"] and name[-1] in "12" else 1
        joined = torch.cat([part[name][0] for part in parts[::step]], dim)
        assert torch.equal(joined, expected), name
    biases = [decoder.blocks[0].out.bias for decoder in decoders]
    assert biases[0] is not None and biases[1:] == [None] * (size - 1), "a bias is added once"


def test_a_rank_reads_only_its_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    take = Checkpoint.take

    def counted(self: Checkpoint, *args: object, **ranges: object) -> Tensor:
        tensor = take(self, *args, **ranges)
        read[-1] += tensor.numel()
        return tensor

    monkeypatch.setattr(Checkpoint, "take", counted)
    embedding, norms = 512 * 64, 5 * 64
    for size in (1, 2, 4):
        for rank in range(size):
            read.append(0)
            load_decoder(folder, dtype=torch.float32, part=Part(Shard(rank, size)))
    whole, *halves_and_quarters = (count - embedding - norms for count in read)
    halves, quarters = halves_and_quarters[:2], halves_and_quarters[2:]
    assert sum(halves) == whole
    assert max(halves) < 0.53 * whole
    replicated = 2 * 2 * 2 * (16 * 64 + 16)  # each layer's groups, keys and values, once more
    assert sum(quarters) == whole + replicated


def test_rows_are_where_the_file_is_mapped_and_columns_a_copy(folder: Path) -> None:
    tensors = Checkpoint(folder, torch.float32)
    whole = tensors.take("lm_head.weight", 512, 64)
    rows = tensors.take("lm_head.weight", 512, 64, rows=range(256, 512))
    assert rows.data_ptr() == whole[256:].data_ptr()
    columns = tensors.take("lm_head.weight", 512, 64, columns=range(16, 48))
    assert columns.untyped_storage().nbytes() == 512 * 32 * 4
    assert torch.equal(columns, whole[:, 16:48])
    assert len(tensors.take("lm_head.weight", 512, 64, rows=range(0))) == 0


def test_a_misshapen_tensor_is_named_whatever_part_is_taken(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"lm_head.weight has shape \[512, 64\], .* \[513, 64\]"):
        Checkpoint(folder, torch.float32).take("lm_head.weight", 513, 64, rows=range(16))
