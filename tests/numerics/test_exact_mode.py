"""Exact mode: a row's bits are a function of its path, whatever shares its forward."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch
from torch import Tensor

from target_workers import forward
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from target_workers.model.attention import AttentionPlan, attend, plan_attention
from target_workers.model.batch import RowBatch, build_batch
from target_workers.model.config import ModelConfig
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import load_decoder
from target_workers.model.run import IntArray, Run
from target_workers.model.self_test import ExactModeError, exact_self_test
from tests.numerics.forward import (
    NUM_SLOTS,
    Path,
    in_chunks,
    logits_of,
    new_cache,
    node_paths,
    random_parents,
    random_sizes,
    random_tokens,
    tree_logits,
)
from tests.tiny import make_tiny

TYPES = [torch.float32, torch.bfloat16]
SHAPES = {
    "grouped": {},
    "one kv head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "wide": {"intermediate_size": 2048},
    "window": {"sliding_window": 100},
}


@dataclass(frozen=True)
class Subject:
    """A model in exact mode, and the type of its keys and values."""

    decoder: Decoder
    kv: torch.dtype

    def in_chunks(self, path: Path, sizes: Iterable[int] = ()) -> Tensor:
        return in_chunks(self.decoder, path, sizes, self.kv)

    def new_cache(self) -> KVCache:
        return new_cache(self.decoder, self.kv)


SUBJECTS = {
    "float32": (torch.float32, torch.float32, {}),
    "bf16": (torch.bfloat16, torch.bfloat16, {}),
    "bf16, float32 cache": (torch.bfloat16, torch.float32, {}),
    "float32, bf16 cache": (torch.float32, torch.bfloat16, {}),
    "bf16, int8 cache": (torch.bfloat16, torch.int8, {}),
    "float32, window": (torch.float32, torch.float32, {"sliding_window": 24}),
    "bf16, long window, int8 cache": (torch.bfloat16, torch.int8, {"sliding_window": 390}),
}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    dtype, kv, overrides = SUBJECTS[request.param]
    family = "Mistral" if overrides else "Llama"
    folder = tmp_path_factory.mktemp("exact")
    make_tiny(folder, 1, family, num_hidden_layers=3, **overrides)
    return Subject(load_decoder(folder, dtype=dtype), kv)


@pytest.mark.parametrize("seed", range(3))
def test_every_chunking_gives_the_same_bits(subject: Subject, seed: int) -> None:
    path = Path(random_tokens(640, seed), seed)
    once = subject.in_chunks(path)
    assert torch.equal(subject.in_chunks(path, random_sizes(640, seed)), once)


def test_decoding_token_by_token_gives_the_bits_of_prefill(subject: Subject) -> None:
    path = Path(random_tokens(530, 1), 1)
    once = subject.in_chunks(path)
    assert torch.equal(subject.in_chunks(path, [480, *[1] * 50]), once)


@pytest.mark.parametrize("context", [1, 40, 125, 505])
def test_every_tree_node_has_the_bits_of_its_path_alone(subject: Subject, context: int) -> None:
    path = Path(random_tokens(context, context), 3)
    tokens, parents = random_tokens(14, seed=5), random_parents(14, seed=context)
    trunk, logits = tree_logits(subject.decoder, path, tokens, parents, kv=subject.kv)
    assert torch.equal(trunk, subject.in_chunks(path)[-1:])
    for node, alone in enumerate(node_paths(path, tokens, parents)):
        assert torch.equal(logits[node], subject.in_chunks(alone)[-1])


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_other_sequences_change_no_bit(subject: Subject, seed: int) -> None:
    generator = np.random.default_rng(seed)
    pools = np.array_split(generator.permutation(NUM_SLOTS), 5)
    lengths = [int(length) for length in generator.integers(2, 300, 4)] + [pools[4].size]
    paths = [
        Path(random_tokens(length, 10 * seed + index), index, pool=pool)
        for index, (length, pool) in enumerate(zip(lengths, pools, strict=True))
    ]
    decoder, cache = subject.decoder, subject.new_cache()
    batch, expected = [], []
    for path in paths:
        end = len(path.tokens)
        start = int(generator.integers(max(0, end - 20), end))
        if start:
            logits_of(decoder, cache, [path.run(0, start)])
        batch.append(path.run(start, end))
        expected.append(subject.in_chunks(path)[start:])
    order = generator.permutation(len(paths))
    got = logits_of(decoder, cache, [batch[index] for index in order])
    assert torch.equal(got, torch.cat([expected[index] for index in order]))


def test_a_later_guess_changes_no_bit_of_earlier_rows(subject: Subject) -> None:
    tokens = random_tokens(300, 2)
    before = subject.in_chunks(Path(tokens, 1), [290])
    tokens = tokens.copy()
    tokens[297] = (tokens[297] + 1) % 512
    after = subject.in_chunks(Path(tokens, 1), [290])
    assert torch.equal(before[:297], after[:297])
    assert not torch.equal(before[297], after[297])


def test_garbage_in_other_slots_changes_no_bit(subject: Subject) -> None:
    path = Path(random_tokens(20, 2), 1)
    clean, dirty = subject.new_cache(), subject.new_cache()
    spoil(dirty, subject.decoder.config, np.arange(NUM_SLOTS))
    expected = logits_of(subject.decoder, clean, [path.run(0, 20)])
    assert torch.equal(logits_of(subject.decoder, dirty, [path.run(0, 20)]), expected)


def spoil(cache: KVCache, config: ModelConfig, slots: IntArray) -> None:
    """Make the keys and values in these slots NaN, in all layers."""
    wrong = torch.full((len(slots), config.num_kv_heads, config.head_dim), torch.nan)
    for layer in range(config.num_layers):
        cache.write(layer, torch.from_numpy(slots), wrong, wrong)


@pytest.mark.parametrize(("window", "untouched"), [(24, 384), (129, 384), (130, 256), (600, 0)])
def test_blocks_before_the_window_are_not_fetched(
    window: int, untouched: int, tmp_path: FilePath
) -> None:
    """Rows of the block from 512 on: the first sees position 513 - window and no earlier one."""
    make_tiny(tmp_path, 1, "Mistral", sliding_window=window)
    decoder = load_decoder(tmp_path, dtype=torch.float32)
    path, cache = Path(random_tokens(530, 1), 1), new_cache(decoder)
    plan = plan_attention(build_batch([path.run(520, 530)]), decoder.config, torch.float32)
    (group,) = plan.windows[window].groups
    assert set(group.slots.tolist()) == set(path.slots[untouched:530].tolist())
    logits_of(decoder, cache, [path.run(0, 520)])
    spoil(cache, decoder.config, path.slots[:untouched])
    got = logits_of(decoder, cache, [path.run(520, 530)])
    assert torch.equal(got, in_chunks(decoder, path, [])[520:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bf16"])
def test_the_self_test_passes_in_exact_mode(
    shape: str, dtype: torch.dtype, tmp_path: FilePath
) -> None:
    family = "Mistral" if shape == "window" else "Llama"
    folder = make_tiny(tmp_path, 5, family, **SHAPES[shape])
    decoder = load_decoder(folder, dtype=dtype)
    for seed in range(3):
        assert exact_self_test(decoder, seed), "the number of threads changes no bit"
        assert exact_self_test(decoder, seed, kv_dtype=torch.int8)


def test_exact_mode_is_refused_where_no_kernel_gives_it(tiny_llama: FilePath) -> None:
    with pytest.raises(ExactModeError, match=r"float64 .* set target.exact = false"):
        exact_self_test(load_decoder(tiny_llama, dtype=torch.float64), 0)


class Unsteady:
    """A decoder in whose results something of the batch shows, if its cache is of a type."""

    def __init__(self, decoder: Decoder, kv: torch.dtype | None = None) -> None:
        self._decoder, self._kv = decoder, kv
        self.config, self.dtype, self.is_exact = decoder.config, decoder.dtype, True
        self.normed, self.logits = decoder.normed, decoder.logits

    def stream(self, batch: RowBatch, cache: KVCache) -> Iterator[Tensor]:
        company = len(batch.tokens) if self._kv in (None, cache.dtype) else 1
        for x in self._decoder.stream(batch, cache):
            yield x * (1 + company / 1000)


def test_the_self_test_names_what_differs(tiny_llama: FilePath) -> None:
    decoder = load_decoder(tiny_llama, dtype=torch.float32)
    with pytest.raises(ExactModeError, match=r"position \d+ differs .* target.exact = false"):
        exact_self_test(Unsteady(decoder), seed=0)


def test_the_self_test_uses_the_cache_it_is_for(tiny_llama: FilePath) -> None:
    decoder = Unsteady(load_decoder(tiny_llama, dtype=torch.float32), torch.int8)
    exact_self_test(decoder, 0)
    with pytest.raises(ExactModeError, match="differs"):
        exact_self_test(decoder, 0, kv_dtype=torch.int8)


@pytest.mark.parametrize(
    ("threads", "proven"), [((), {1, 2}), ((3, 2), {2, 3}), ((1, 3), {1, 2, 3})]
)
def test_the_self_test_tries_every_number_of_threads(
    tiny_llama: FilePath, threads: tuple[int, ...], proven: set[int]
) -> None:
    seen: set[int] = set()

    class Watched(Unsteady):
        def stream(self, batch: RowBatch, cache: KVCache) -> Iterator[Tensor]:
            seen.add(torch.get_num_threads())
            return super().stream(batch, cache)

    decoder = Watched(load_decoder(tiny_llama, dtype=torch.float32), torch.int8)
    torch.set_num_threads(2)
    try:
        exact_self_test(decoder, 0, threads)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == proven


class ByThreads(Unsteady):
    """A decoder whose results show how many threads computed them, and nothing of the batch."""

    def stream(self, batch: RowBatch, cache: KVCache) -> Iterator[Tensor]:
        for x in self._decoder.stream(batch, cache):
            yield x * (1 + torch.get_num_threads() / 1000)


def test_bits_that_depend_on_threads_keep_their_number(
    tiny_llama: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = ByThreads(load_decoder(tiny_llama, dtype=torch.float32), torch.float32)
    decoder.compile = lambda kv_dtype: None  # type: ignore[attr-defined]
    assert not exact_self_test(decoder, 0, threads=(1, 2))
    monkeypatch.setattr(forward, "load_decoder", lambda *_, **__: decoder)
    config = TargetConfig(str(tiny_llama), dtype="fp32", num_pages=8, threads=(1, 2))
    engine = load_target(config, vocab_hash="", incarnation=1)
    engine._forward.set_cores(2)
    assert torch.get_num_threads() == 1


def attend_reference(qk: Tensor, cached: Tensor, plan: AttentionPlan, window: int) -> Tensor:
    """Attention by definition, row by row in float64."""
    heads, group = plan.config.num_heads, plan.config.group
    rows, outputs = iter(qk[:, :heads].double()), []
    for run in plan.batch.runs:
        for index in range(len(run.tokens)):
            slots = torch.from_numpy(np.concatenate([run.history, run.slots[: index + 1]]))
            slots = slots[-window:]
            seen = cached[slots].double().repeat_interleave(group, dim=2)  # [seen, 2, heads, dim]
            scores = torch.einsum("hd,shd->hs", next(rows), seen[:, 0]) / qk.shape[-1] ** 0.5
            outputs.append(torch.einsum("hs,shd->hd", scores.softmax(-1), seen[:, 1]).flatten())
    return torch.stack(outputs).to(qk.dtype)


@pytest.mark.parametrize("kv", [torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize("windows", [(), (5, 0, 300)])
def test_attention_is_what_its_definition_says(
    windows: tuple[int, ...], kv: torch.dtype, tiny_llama: FilePath
) -> None:
    config = replace(ModelConfig.from_folder(tiny_llama), windows=windows)
    generator = np.random.default_rng(3)
    slots = generator.permutation(NUM_SLOTS)
    shapes, runs = [(0, 5), (70, 1), (500, 140), (3, 2), (700, 1), (511, 3)], []
    for start, count in shapes:
        new, slots = np.split(slots, [count])
        runs.append(Run(random_tokens(count, 1), start, new, generator.permutation(slots)[:start]))
    batch = build_batch(runs)
    plan = plan_attention(batch, config, torch.float32)
    heads = config.num_heads + config.num_kv_heads
    qk = torch.randn(len(batch.tokens), heads, config.head_dim)
    cache, everything = KVCache(config, NUM_SLOTS, kv), torch.arange(NUM_SLOTS)
    for layer in range(config.num_layers):
        keys, values = torch.randn(2, NUM_SLOTS, config.num_kv_heads, config.head_dim)
        cache.write(layer, everything, keys, values)
        held = cache.read(layer, everything, torch.empty(cache.layer(layer).shape))
        expected = attend_reference(qk, held, plan, config.window(layer))
        assert (attend(qk, cache, layer, plan) - expected).abs().max() < 1e-5


@pytest.mark.model
@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bf16"])
def test_the_small_model_is_exact(small_model: FilePath, dtype: torch.dtype) -> None:
    decoder = load_decoder(small_model, dtype=dtype)
    exact_self_test(decoder, seed=1)
    path = Path(random_tokens(524, 3, vocab=decoder.config.vocab_size), 1)
    once = in_chunks(decoder, path, [])
    assert torch.equal(in_chunks(decoder, path, [505, 1, 8, 3, 1, 1]), once)
    tokens, parents = random_tokens(10, seed=5), random_parents(10, seed=2)
    _, logits = tree_logits(decoder, path, tokens, parents)
    alone = node_paths(path, tokens, parents)[-1]
    assert torch.equal(logits[-1], in_chunks(decoder, alone, [])[-1])
