"""Attention over pages of one token, by a stand-in for FlashInfer: the numbers of torch's own."""

import logging
import sys
from dataclasses import replace
from pathlib import Path as Folder
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from target_workers.model.attention import Attention, Setting, TorchAttention
from target_workers.model.attention_choice import (
    Guarded,
    Unfit,
    check_fit,
    find_library,
    prefer_flashinfer,
    prove,
)
from target_workers.model.batch import build_batch
from target_workers.model.decoder import TorchDecoder
from target_workers.model.flashinfer import Kit, Library, PagedAttention, Table, workspace_bytes
from target_workers.model.loading import load_reference
from tests.fake_flashinfer import PagedWrapper
from tests.numerics.scenes import ONE, SCENES, attending, new_cache, setting_of, states_of
from tests.tiny import make_tiny

TOLERANCE = 1e-10
WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
MODELS = {
    "grouped": ("Llama", {}),
    "one kv head": ("Llama", {"num_key_value_heads": 1}),
    "no groups": ("Llama", {"num_key_value_heads": 4}),
    "window": ("Mistral", {"sliding_window": 24}),
    "window of one": ("Mistral", {"sliding_window": 1}),
    "window in some layers": ("Qwen3", WINDOW),
}


@pytest.fixture(scope="module", params=MODELS)
def decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TorchDecoder:
    family, overrides = MODELS[request.param]
    folder = make_tiny(tmp_path_factory.mktemp("paged"), 1, family, head_dim=64, **overrides)
    return load_reference(folder, dtype=torch.float64)


@pytest.mark.parametrize("scene", SCENES)
def test_every_forward_has_the_numbers_of_torch(decoder: TorchDecoder, scene: str) -> None:
    expected = states_of(decoder, SCENES[scene])
    paged = PagedAttention(setting_of(decoder), Kit(PagedWrapper))
    got = states_of(attending(decoder, paged), SCENES[scene])
    assert (got - expected).abs().max() <= TOLERANCE


class OneKeyMore(PagedWrapper):
    more_window = 1


class TopLeft(PagedWrapper):
    top_left = True


class Broken(PagedWrapper):
    def plan(self, **_arguments: object) -> None:
        raise RuntimeError("buffer overflow when allocating batch_prefill_tmp_v")


@pytest.fixture
def windowed(tmp_path: Folder) -> TorchDecoder:
    """A decoder that is as FlashInfer wants it, with a window in its second layer."""
    folder = make_tiny(tmp_path, 1, "Qwen3", head_dim=64, **WINDOW)
    return load_reference(folder, dtype=torch.bfloat16)


def test_a_right_library_proves_right(windowed: TorchDecoder) -> None:
    prove(setting_of(windowed), Kit(PagedWrapper))


@pytest.mark.parametrize("library", [OneKeyMore, TopLeft])
def test_a_library_that_masks_otherwise_is_found_out(
    windowed: TorchDecoder, library: Library
) -> None:
    with pytest.raises(Unfit, match="off by"):
        prove(setting_of(windowed), Kit(library))


@pytest.mark.parametrize(
    ("own", "head_dim", "kv_dtype", "reason"),
    [
        (torch.float32, 64, torch.float32, "not in torch.float32"),
        (torch.bfloat16, 64, torch.int8, "not torch.int8"),
        (torch.bfloat16, 64, torch.float32, "must be torch.bfloat16"),
        (torch.float16, 64, torch.bfloat16, "must be torch.float16"),
        (torch.bfloat16, 96, torch.bfloat16, "not of 96"),
    ],
)
def test_what_has_no_kernel_is_told_before_it_is_tried(
    windowed: TorchDecoder, own: torch.dtype, head_dim: int, kv_dtype: torch.dtype, reason: str
) -> None:
    config = replace(windowed.config, head_dim=head_dim)
    setting = Setting(config, own, torch.device("cpu"))
    with pytest.raises(Unfit, match=reason):
        check_fit(setting, kv_dtype)


def prefer(decoder: TorchDecoder, library: Library) -> Attention:
    """What is chosen where this library is found."""
    return prefer_flashinfer(setting_of(decoder), decoder.dtype, lambda _device: Kit(library))


def test_the_choice_is_told(windowed: TorchDecoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert prefer(windowed, PagedWrapper).name == "flashinfer"
    assert "attention on cpu: flashinfer" in caplog.text


@pytest.mark.parametrize("library", [OneKeyMore, Broken])
def test_what_does_not_prove_right_is_not_chosen_and_told(
    windowed: TorchDecoder, library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    assert prefer(windowed, library).name == "torch"
    (message,) = caplog.messages
    assert "torch, since" in message and ("off by" in message or "overflow" in message)


def test_where_it_is_not_installed_the_remedy_is_told(
    windowed: TorchDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    chosen = prefer_flashinfer(
        setting_of(windowed), windowed.dtype, lambda _device: Kit(find_library())
    )
    assert chosen.name == "torch"
    assert "pip install 'paceline[cuda]'" in caplog.text


def test_the_installed_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PagedWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    assert find_library() is PagedWrapper


def test_a_cpu_attends_with_torch(windowed: TorchDecoder) -> None:
    assert windowed.attention(windowed.dtype).name == "torch"
    assert windowed.graphs(new_cache(windowed)) is None


class Narrow(PagedWrapper):
    """Takes no forward of more than 100 rows."""

    def plan(self, qo_indptr: Tensor, **arguments: Any) -> None:
        if int(qo_indptr[-1]) > 100:
            raise RuntimeError("buffer overflow when allocating batch_prefill_tmp_v")
        super().plan(qo_indptr, **arguments)


def test_a_forward_that_cannot_be_planned_is_computed_with_torch(
    decoder: TorchDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    setting = setting_of(decoder)
    both = Guarded(PagedAttention(setting, Kit(Narrow)), TorchAttention(setting))
    forwards = [[ONE.run(0, 150)], [ONE.run(150, 200)]]
    expected = states_of(decoder, forwards)
    assert (states_of(attending(decoder, both), forwards) - expected).abs().max() <= TOLERANCE
    (message,) = caplog.messages
    assert "attention of 150 rows: torch, since RuntimeError: buffer overflow" in message


def test_a_forward_planned_in_the_middle_of_another_is_a_bug(decoder: TorchDecoder) -> None:
    paged = attending(decoder, PagedAttention(setting_of(decoder), Kit(PagedWrapper)))
    cache = new_cache(paged)
    first = paged.stream(build_batch([ONE.run(0, 5)]), cache)
    next(first)
    paged.hidden(build_batch([ONE.run(5, 6)]), cache)
    with pytest.raises(AssertionError, match="ends before the next"):
        next(first)


def test_keys_that_a_window_hides_from_every_row_are_not_listed() -> None:
    table = Table.of([ONE.run(100, 103), ONE.run(3, 4)], window=24)
    assert table.keys.tolist() == [0, 26, 30]
    assert table.slots[:26].tolist() == ONE.slots[77:103].tolist()
    assert Table.of([ONE.run(100, 103)], window=0).keys.tolist() == [0, 103]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (64, 8, 128), (64, 4, 128)]
)
def test_the_workspace_holds_what_the_planner_lays_out(
    windowed: TorchDecoder, heads: int, kv_heads: int, head_dim: int
) -> None:
    """The sizes of PrefillPlan in attention/scheduler.cuh: of a graph, and of a prompt in parts."""
    shape = replace(windowed.config, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    processors, rows, group = 132, 256, heads // kv_heads
    parts = 2 * processors // kv_heads
    tiles = max(parts, -(-rows * group // 16) + rows - 1)
    for padded, tile in ((parts, 128), (tiles, 16)):
        needed = heads * padded * tile * (head_dim + 1) * 4
        assert needed + 64 <= workspace_bytes(shape, processors)
