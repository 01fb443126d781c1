"""The CPU kernels against their definitions, each alone; test_exact_mode has them together."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from target_workers.model.batch import build_batch
from target_workers.model.config import ModelConfig
from target_workers.model.kv_cache import KVCache, quantised
from target_workers.model.loading import load_decoder, load_reference
from target_workers.model.native import compiling
from target_workers.model.native import decoder as native_decoder
from target_workers.model.native.attention import attend
from target_workers.model.native.block import make_tiles
from target_workers.model.native.chunk import Cached
from target_workers.model.native.decoder import NO_SCALES
from target_workers.model.native.elementwise import add_and_norm, exp
from target_workers.model.native.jit import kernel
from target_workers.model.native.linear import as_array, gated, linear, pack, pack_gated
from target_workers.model.native.llvm import has_pair_dot
from target_workers.model.native.place import Heads, place
from target_workers.model.run import IntArray, Run
from tests.numerics.forward import Path as TokenPath
from tests.numerics.forward import in_chunks, random_tokens
from tests.tiny import make_tiny

ROWS = (1, 2, 4, 5, 8, 9, 19)
SHAPES = ((32, 32), (64, 96), (70, 59), (333, 64))  # outputs, inputs
KINDS = {
    "bf16 pairs": (torch.bfloat16, True, False),
    "bf16": (torch.bfloat16, False, False),
    "float32": (torch.float32, False, False),
    "int8 pairs": (torch.bfloat16, True, True),
    "int8": (torch.float32, False, True),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, bool, bool]:
    dtype, in_pairs, as_int8 = KINDS[request.param]
    if in_pairs and not has_pair_dot():
        pytest.skip("this CPU multiplies no pairs of bfloat16")
    return dtype, in_pairs, as_int8


def inputs(rows: int, width: int, *, in_pairs: bool) -> tuple[Tensor, np.ndarray]:
    """Random rows as the definition takes them and as a kernel does, filled up to a whole pair."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
    full = torch.nn.functional.pad(x, (0, width % 2))
    return x.double(), as_array(full) if in_pairs else full.float().numpy()


def weights(outs: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outs)
    weight = torch.randn(outs, width, generator=generator) / width**0.5
    return weight.to(dtype), torch.randn(outs, generator=generator).to(dtype)


def kept(weight: Tensor, *, as_int8: bool) -> Tensor:
    """The weights as they are kept, in float64."""
    if not as_int8:
        return weight.double()
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round().double() * scale.double()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_linear_map_is_what_its_definition_says(
    kind: tuple[torch.dtype, bool, bool], shape: tuple[int, int]
) -> None:
    dtype, in_pairs, as_int8 = kind
    weight, bias = weights(*shape, dtype)
    packed = pack(weight, bias, in_pairs=in_pairs, as_int8=as_int8)
    for rows in ROWS:
        x, taken = inputs(rows, shape[1], in_pairs=in_pairs)
        out = np.full((rows, shape[0]), np.nan, np.float32)
        linear(packed, taken, out, 1)
        expected = x @ kept(weight, as_int8=as_int8).T + bias.double()
        assert np.abs(out - expected.numpy()).max() < 1e-5, rows


@pytest.mark.parametrize("inner", [16, 59, 176])
def test_gate_and_up_are_what_their_definition_says(
    kind: tuple[torch.dtype, bool, bool], inner: int
) -> None:
    dtype, in_pairs, as_int8 = kind
    weight, bias = weights(2 * inner, 64, dtype)
    packed = pack_gated(weight, bias, in_pairs=in_pairs, as_int8=as_int8)
    for rows in ROWS:
        x, taken = inputs(rows, 64, in_pairs=in_pairs)
        out = np.full((rows, inner + inner % 2), 7, taken.dtype)
        gated(packed, taken, out, 1)
        gate, up = (x @ kept(weight, as_int8=as_int8).T + bias.double()).split(inner, 1)
        expected = torch.nn.functional.silu(gate) * up
        got = torch.from_numpy(out)
        got = got.view(torch.bfloat16).double() if in_pairs else got.double()
        rounding = 2**-8 if in_pairs else 0
        assert torch.allclose(got[:, :inner], expected, rtol=rounding, atol=1e-5)
        assert not got[:, inner:].any(), "what fills up a pair is zero"


def test_neither_company_nor_threads_change_a_bit_of_a_row(
    kind: tuple[torch.dtype, bool, bool],
) -> None:
    dtype, in_pairs, as_int8 = kind
    weight, bias = weights(333, 96, dtype)
    packed = pack(weight, bias, in_pairs=in_pairs, as_int8=as_int8)
    _, taken = inputs(40, 96, in_pairs=in_pairs)
    together = np.empty((40, 333), np.float32)
    linear(packed, taken, together, 1)
    for threads in (1, 2, 3, 50):
        for begin, end in ((0, 1), (3, 5), (7, 11), (2, 9), (1, 40)):
            out = np.empty((end - begin, 333), np.float32)
            linear(packed, taken[begin:end], out, threads)
            assert np.array_equal(out, together[begin:end]), (threads, begin, end)


@kernel
def exponentials(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(x)):
        out[i] = exp(x[i])


def test_exponentials_are_right_to_the_last_places() -> None:
    x = np.linspace(-86, 87, 100_001, dtype=np.float32)
    out = np.empty_like(x)
    exponentials(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 2e-7
    special = np.array([-np.inf, -1e30, np.nan, 0], np.float32)
    out = np.empty_like(special)
    exponentials(special, out)
    assert 0 <= out[0] == out[1] < 1e-37 and np.isnan(out[2]) and out[3] == 1


@pytest.mark.parametrize("rows", [1, 15, 40])
def test_a_sum_is_added_and_normed(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, delta = torch.randn(2, rows, 96, generator=generator)
    weight = torch.randn(96, generator=generator)
    stream, out = x.clone(), torch.empty(rows, 96)
    add_and_norm(stream.numpy(), delta.numpy(), weight.numpy(), 1e-5, out.numpy(), 2)
    assert torch.equal(stream, x + delta)
    expected = torch.nn.functional.rms_norm((x + delta).double(), (96,), weight.double(), 1e-5)
    assert (out - expected).abs().max() < 1e-5


CONFIGS = {
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    "wide heads": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 96},
    "no groups": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 48},
    "one for all": {"num_heads": 32, "num_kv_heads": 1, "head_dim": 64},
}
CACHES = {
    "float32": (torch.float32, np.float32),
    "bf16": (torch.bfloat16, np.float32),
    "bf16 pairs": (torch.bfloat16, np.uint16),
    "int8": (torch.int8, np.float32),
}
SLOTS = 3000
PATHS = ((0, 5), (70, 1), (500, 40), (255, 3), (700, 1), (511, 2), (0, 1))  # start, rows


def attended(qk: Tensor, held: Tensor, run: Run, group: int, window: int) -> list[Tensor]:
    """By definition, row by row: queries [rows, heads, dim], held [slots, 2, kv_heads, dim]."""
    found = []
    for i in range(len(run.tokens)):
        seen = np.concatenate([run.history, run.slots[: i + 1]])[-window:]
        keys, values = held[torch.from_numpy(seen)].double().repeat_interleave(group, 2).unbind(1)
        weights = torch.einsum("hd,shd->hs", qk[i].double(), keys).softmax(-1)
        found.append(torch.einsum("hs,shd->hd", weights, values).flatten())
    return found


def scattered_runs(seed: int) -> list[Run]:
    generator = np.random.default_rng(seed)
    free: IntArray = generator.permutation(SLOTS)
    runs = []
    for start, count in PATHS:
        new, free = np.split(free, [count])
        runs.append(Run(np.zeros(count, np.int64), start, new, generator.permutation(free)[:start]))
    return runs


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shape", CONFIGS)
@pytest.mark.parametrize("window", [0, 5, 300])
def test_attention_is_what_its_definition_says(
    shape: str, cache: str, window: int, tmp_path: Path
) -> None:
    kv, taken = CACHES[cache]
    config = replace(ModelConfig.from_folder(make_tiny(tmp_path, 1, "Llama")), **CONFIGS[shape])
    if taken is np.uint16 and (config.head_dim % 32 or not has_pair_dot()):
        pytest.skip("not in pairs")
    generator = torch.Generator().manual_seed(1)
    runs = scattered_runs(3)
    held = KVCache(config, SLOTS, kv)
    keys, values = torch.randn(2, SLOTS, config.num_kv_heads, config.head_dim, generator=generator)
    held.write(0, torch.arange(SLOTS), keys, values)
    rows = sum(len(run.tokens) for run in runs)
    q = torch.randn(rows, config.num_heads, config.head_dim, generator=generator)
    q = (q * config.head_dim**-0.5).bfloat16()
    scales = held.layer_scales(0)
    cached = Cached(
        as_array(held.layer(0)), NO_SCALES if scales is None else scales.numpy(), window
    )
    given = as_array(q) if taken is np.uint16 else q.float().numpy()
    plain = held.read(0, torch.arange(SLOTS), torch.empty(held.layer(0).shape))
    expected, first = [], 0
    for run in runs:
        part = q[first : first + len(run.tokens)]
        expected += attended(part, plain, run, config.group, window)
        first += len(run.tokens)
    once = np.empty((rows, config.num_heads * config.head_dim), np.float32)
    attend(given, cached, make_tiles(runs, config.group), once, 1)
    rounding = 1e-2 if taken is np.uint16 else 1e-5  # there the weights of values are bfloat16
    assert (torch.from_numpy(once) - torch.stack(expected)).abs().max() < rounding
    many = np.empty_like(once)
    attend(given, cached, make_tiles(runs, config.group), many, 3)
    assert np.array_equal(once, many), "who computes a chunk changes no bit"


@pytest.mark.parametrize("value", [1.0, 0.0, float("nan"), float("inf")])
def test_new_keys_and_values_are_kept_as_the_cache_keeps_them(value: float, tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_tiny(tmp_path, 1, "Llama"))
    size, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    qkv = torch.randn(3, heads + 2 * kv_heads, size)
    qkv[1, -1, 3] = value
    qkv[2, -1] = 0
    nowhere = np.ones((1, size), np.float32)  # no rotation: cosine 1 and sine 0
    turns = Heads(np.empty((0, 0), np.float32), 0.0, nowhere, 0 * nowhere, 0.5)
    cache = KVCache(config, 8, torch.int8)
    scales = cache.layer_scales(0)
    assert scales is not None
    queries = np.empty((3, heads, size), np.float32)
    place(
        qkv.flatten(1).numpy().copy(),
        np.zeros(3, np.int64),
        np.array([5, 0, 7]),
        turns,
        Cached(as_array(cache.layer(0)), scales.numpy(), 0),
        queries,
        1,
    )
    assert np.array_equal(queries, 0.5 * qkv[:, :heads].numpy())
    for part, begin in ((0, heads), (1, heads + kv_heads)):
        steps, scale = quantised(qkv[:, begin : begin + kv_heads])
        slots = torch.tensor([5, 0, 7])
        assert torch.equal(cache.layer(0)[slots, part], steps)
        assert torch.equal(scales[slots, part].nan_to_num(7), scale.nan_to_num(7))


def test_a_cpu_without_pairs_gives_what_one_with_them_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny(tmp_path, 4, "Qwen3")
    path = TokenPath(random_tokens(300, 1), 1)
    rows = []
    for pairs in (has_pair_dot(), False):
        monkeypatch.setattr(native_decoder, "has_pair_dot", lambda pairs=pairs: pairs)
        decoder = load_decoder(folder, dtype=torch.bfloat16)
        rows.append(in_chunks(decoder, path, [200, 1, 3]))
    reference = in_chunks(load_reference(folder, dtype=torch.float32), path, [])
    for logits in rows:
        assert (logits - reference).abs().max() < 0.15
    assert (rows[0] - rows[1]).abs().max() < 0.15


def test_int8_weights_are_near_the_model_they_stand_for(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, 4, "Qwen2")
    path = TokenPath(random_tokens(200, 1), 1)
    whole = in_chunks(load_reference(folder, dtype=torch.float32), path, [])
    narrow = in_chunks(load_decoder(folder, dtype=torch.bfloat16, int8=True), path, [])
    assert 0 < (whole - narrow).abs().mean() < 0.1


def test_the_stream_gives_every_block_and_may_stop(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, 4, "Llama")
    path = TokenPath(random_tokens(20, 1), 1)
    batch = build_batch([path.run(0, 20)])
    states = []
    for decoder in (
        load_decoder(folder, dtype=torch.float32),
        load_reference(folder, dtype=torch.float32),
    ):
        cache = KVCache(decoder.config, 2048, torch.float32)
        states.append(list(decoder.stream(batch, cache)))
    assert len(states[0]) == len(states[1]) == 3
    for native, reference in zip(*states, strict=True):
        assert (native - reference).abs().max() < 1e-4


OTHER_CPU = """
import sys, torch
from pathlib import Path
from target_workers.model.loading import load_decoder, load_reference
from tests.numerics.forward import Path as Tokens, in_chunks, random_tokens
folder, path = Path(sys.argv[1]), Tokens(random_tokens(40, 1), 1)
decoder = load_decoder(folder, dtype=torch.bfloat16)
assert not decoder._in_pairs
logits = in_chunks(decoder, path, [30, 1])
assert torch.equal(logits, in_chunks(decoder, path, []))
reference = in_chunks(load_reference(folder, dtype=torch.float32), path, [])
print(float((logits - reference).abs().max()))
"""


def test_kernels_compile_for_a_cpu_without_any_bfloat16(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, 4, "Llama", num_hidden_layers=1)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_CPU, str(folder)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 0.15


def test_an_odd_width_is_left_to_torch(tmp_path: Path) -> None:
    odd = {"hidden_size": 65, "num_attention_heads": 5, "num_key_value_heads": 5}
    folder = make_tiny(tmp_path, 4, "Llama", **odd)
    assert not load_decoder(folder, dtype=torch.bfloat16).is_exact


FIRST_KERNEL = """
import torch
torch.set_num_threads(1)
from pathlib import Path
import sys
from target_workers.model.loading import load_decoder
load_decoder(Path(sys.argv[1]), dtype=torch.float32).compile(torch.float32)
print(torch.get_num_threads())
"""


def test_the_first_kernel_leaves_torch_its_count_of_threads(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, 4, "Llama", num_hidden_layers=1)
    done = subprocess.run(
        [sys.executable, "-c", FIRST_KERNEL, str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "1"


def test_a_held_lock_delays_compiling_by_its_bound_only(caplog: pytest.LogCaptureFixture) -> None:
    with compiling(), compiling(timeout_s=0.01):
        assert "not free" in caplog.text


def test_the_lock_is_free_after_compiling(caplog: pytest.LogCaptureFixture) -> None:
    with compiling():
        pass
    with compiling(timeout_s=0.0):
        assert not caplog.text
