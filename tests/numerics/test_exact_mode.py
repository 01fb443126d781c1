"""Exact mode: a row's bits are a function of its path, whatever shares its forward."""

from pathlib import Path as FilePath

import numpy as np
import pytest
import torch
from torch import Tensor

from target_workers.model.attention import AttentionPlan, attend, plan_attention
from target_workers.model.batch import build_batch
from target_workers.model.config import ModelConfig
from target_workers.model.decoder import Decoder
from target_workers.model.exact import ExactModeError, fit_rows
from target_workers.model.layers import Linear
from target_workers.model.loading import load_decoder
from target_workers.model.run import Run
from target_workers.model.self_test import exact_self_test
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
}


@pytest.fixture(scope="module", params=TYPES, ids=["float32", "bf16"])
def decoder(request: pytest.FixtureRequest, tiny_llama: FilePath) -> Decoder:
    return load_decoder(tiny_llama, dtype=request.param, exact=True)


@pytest.mark.parametrize("seed", range(3))
def test_every_chunking_gives_the_same_bits(decoder: Decoder, seed: int) -> None:
    path = Path(random_tokens(640, seed), seed)
    once = in_chunks(decoder, path, [])
    assert torch.equal(in_chunks(decoder, path, random_sizes(640, seed)), once)


def test_decoding_token_by_token_gives_the_bits_of_prefill(decoder: Decoder) -> None:
    path = Path(random_tokens(530, 1), 1)
    once = in_chunks(decoder, path, [])
    assert torch.equal(in_chunks(decoder, path, [480, *[1] * 50]), once)


@pytest.mark.parametrize("context", [1, 40, 125, 505])
def test_every_tree_node_has_the_bits_of_its_path_alone(decoder: Decoder, context: int) -> None:
    path = Path(random_tokens(context, context), 3)
    tokens, parents = random_tokens(14, seed=5), random_parents(14, seed=context)
    trunk, logits = tree_logits(decoder, path, tokens, parents)
    assert torch.equal(trunk, in_chunks(decoder, path, [])[-1:])
    for node, alone in enumerate(node_paths(path, tokens, parents)):
        assert torch.equal(logits[node], in_chunks(decoder, alone, [])[-1])


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_other_sequences_change_no_bit(decoder: Decoder, seed: int) -> None:
    generator = np.random.default_rng(seed)
    pools = np.array_split(generator.permutation(NUM_SLOTS), 5)
    lengths = [int(length) for length in generator.integers(2, 300, 4)] + [pools[4].size]
    paths = [
        Path(random_tokens(length, 10 * seed + index), index, pool=pool)
        for index, (length, pool) in enumerate(zip(lengths, pools, strict=True))
    ]
    cache, batch, expected = new_cache(decoder), [], []
    for path in paths:
        end = len(path.tokens)
        start = int(generator.integers(max(0, end - 20), end))
        if start:
            logits_of(decoder, cache, [path.run(0, start)])
        batch.append(path.run(start, end))
        expected.append(in_chunks(decoder, path, [])[start:])
    order = generator.permutation(len(paths))
    got = logits_of(decoder, cache, [batch[index] for index in order])
    assert torch.equal(got, torch.cat([expected[index] for index in order]))


def test_a_later_guess_changes_no_bit_of_earlier_rows(decoder: Decoder) -> None:
    tokens = random_tokens(300, 2)
    before = in_chunks(decoder, Path(tokens, 1), [290])
    tokens = tokens.copy()
    tokens[297] = (tokens[297] + 1) % 512
    after = in_chunks(decoder, Path(tokens, 1), [290])
    assert torch.equal(before[:297], after[:297])
    assert not torch.equal(before[297], after[297])


def test_garbage_in_other_slots_changes_no_bit(decoder: Decoder) -> None:
    path = Path(random_tokens(20, 2), 1)
    clean, dirty = new_cache(decoder), new_cache(decoder)
    for layer in range(decoder.config.num_layers):
        dirty.layer(layer).fill_(float("nan"))
    expected = logits_of(decoder, clean, [path.run(0, 20)])
    assert torch.equal(logits_of(decoder, dirty, [path.run(0, 20)]), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64], ids=["float32", "bf16", "float64"])
def test_the_self_test_passes_in_exact_mode(
    shape: str, dtype: torch.dtype, tmp_path: FilePath
) -> None:
    folder = make_tiny(tmp_path, 5, "Llama", **SHAPES[shape])
    decoder = load_decoder(folder, dtype=dtype, exact=True)
    for seed in range(3):
        exact_self_test(decoder, seed)


def test_the_self_test_names_what_differs(tiny_llama: FilePath) -> None:
    decoder = load_decoder(tiny_llama, dtype=torch.float32, exact=True)
    decoder.blocks[1].out = Linear(torch.randn(64, 64))  # not packed: 1 row and 8 take other code
    with pytest.raises(ExactModeError, match=r"position \d+ differs .* target.exact = false"):
        exact_self_test(decoder, seed=0)


@pytest.mark.parametrize(
    ("threads", "proven"), [((), {1, 2}), ((3, 2), {2, 3}), ((1, 3), {1, 2, 3})]
)
def test_the_self_test_tries_every_number_of_threads(
    tiny_llama: FilePath, threads: tuple[int, ...], proven: set[int]
) -> None:
    decoder = load_decoder(tiny_llama, dtype=torch.float32, exact=True)
    seen: set[int] = set()
    decoder.blocks[0].register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        exact_self_test(decoder, 0, threads)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == proven


def test_a_linear_that_needs_company_gets_it() -> None:
    plain = Linear(torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))
    rows = torch.randn(1100, 64, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(plain(rows)[:1], plain(rows[:1]))
    fit_rows([plain])
    assert plain.least_rows > 1
    expected = plain(rows)
    for begin, end in ((0, 1), (5, 8), (0, 513), (1, 1030)):
        assert torch.equal(plain(rows[begin:end]), expected[begin:end])


@pytest.mark.parametrize("rule", [(1, 512), (4, 512), (8, 8), (4, 5)])
def test_calls_keep_to_the_rule(rule: tuple[int, int]) -> None:
    seen: list[int] = []

    class Watched(Linear):
        def _call(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super()._call(x)

    linear = Watched(torch.eye(3))
    linear.least_rows, linear.most_rows = rule
    for count in (1, 2, 7, 8, 9, 63, 512, 513, 1025):
        rows = torch.randn(count, 3)
        assert torch.equal(linear(rows), rows)
    assert rule[0] <= min(seen) and max(seen) <= rule[1]


class Unsteady(Linear):
    """Counts its calls into its results."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + self.calls


def test_a_linear_that_never_repeats_itself_is_refused() -> None:
    with pytest.raises(ExactModeError, match="128 x 64"):
        fit_rows([Unsteady(torch.randn(128, 64))])


def attend_reference(qk: Tensor, cached: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention by definition, row by row in float64."""
    heads, group = plan.config.num_heads, plan.config.group
    rows, outputs = iter(qk[:, :heads].double()), []
    for run in plan.batch.runs:
        for index in range(len(run.tokens)):
            slots = torch.from_numpy(np.concatenate([run.history, run.slots[: index + 1]]))
            seen = cached[slots].double().repeat_interleave(group, dim=2)  # [seen, 2, heads, dim]
            scores = torch.einsum("hd,shd->hs", next(rows), seen[:, 0]) / qk.shape[-1] ** 0.5
            outputs.append(torch.einsum("hs,shd->hd", scores.softmax(-1), seen[:, 1]).flatten())
    outputs += [outputs[-1]] * (len(qk) - len(outputs))
    return torch.stack(outputs).to(qk.dtype)


def test_attention_is_what_its_definition_says(tiny_llama: FilePath) -> None:
    config = ModelConfig.from_folder(tiny_llama)
    generator = np.random.default_rng(3)
    slots = generator.permutation(NUM_SLOTS)
    shapes, runs = [(0, 5), (70, 1), (500, 140), (3, 2), (700, 1), (511, 3)], []
    for start, count in shapes:
        new, slots = np.split(slots, [count])
        runs.append(Run(random_tokens(count, 1), start, new, generator.permutation(slots)[:start]))
    batch = build_batch(runs).padded(8)
    plan = plan_attention(batch, config, torch.float32)
    heads = config.num_heads + config.num_kv_heads
    qk = torch.randn(len(batch.tokens), heads, config.head_dim)
    cached = torch.randn(NUM_SLOTS, 2, config.num_kv_heads, config.head_dim)
    difference = attend(qk, cached, plan) - attend_reference(qk, cached, plan)
    assert difference.abs().max() < 1e-5


@pytest.mark.model
@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bf16"])
def test_the_small_model_is_exact(small_model: FilePath, dtype: torch.dtype) -> None:
    decoder = load_decoder(small_model, dtype=dtype, exact=True)
    exact_self_test(decoder, seed=1)
    path = Path(random_tokens(524, 3, vocab=decoder.config.vocab_size), 1)
    once = in_chunks(decoder, path, [])
    assert torch.equal(in_chunks(decoder, path, [505, 1, 8, 3, 1, 1]), once)
    tokens, parents = random_tokens(10, seed=5), random_parents(10, seed=2)
    _, logits = tree_logits(decoder, path, tokens, parents)
    alone = node_paths(path, tokens, parents)[-1]
    assert torch.equal(logits[-1], in_chunks(decoder, alone, [])[-1])
