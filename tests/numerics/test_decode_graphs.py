"""Decode forwards by graphs, recorded on the CPU: the numbers of eager ones, no trace beside."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from target_workers.model import cuda_graphs
from target_workers.model.cuda_graphs import DecodeGraphs, Record, Recorded
from target_workers.model.decoder import TorchDecoder
from target_workers.model.flashinfer import Kit, PagedAttention
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import load_reference
from target_workers.model.run import Run
from tests.fake_flashinfer import PagedWrapper
from tests.numerics.forward import NUM_SLOTS
from tests.numerics.scenes import (
    SCENES,
    Forwards,
    attending,
    decode,
    leaving,
    new_cache,
    of_many,
    prompts,
    sequences,
    setting_of,
    short_then_long,
    states_of,
)
from tests.tape import record
from tests.tiny import make_tiny

TOLERANCE = 1e-10
WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}


@dataclass
class Counted:
    """A Record that counts what is recorded and replayed, and can spoil what comes out."""

    recorded: int = 0
    replayed: int = 0
    spoil: Callable[[Tensor], object] = field(default=lambda _output: None)

    def __call__(self, compute: Callable[[], Tensor]) -> Recorded:
        self.recorded += 1
        made = record(compute)

        def replay() -> None:
            self.replayed += 1
            made.replay()
            self.spoil(made.output)

        return replace(made, replay=replay)


@pytest.fixture(scope="module", params=["plain", "window in some layers"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchDecoder:
    family, overrides = ("Llama", {}) if request.param == "plain" else ("Qwen3", WINDOW)
    folder = make_tiny(tmp_path_factory.mktemp("graphs"), 1, family, head_dim=64, **overrides)
    return load_reference(folder, dtype=torch.float64)


def graphed(plain: TorchDecoder, recorder: Record) -> TorchDecoder:
    return attending(plain, PagedAttention(setting_of(plain), Kit(PagedWrapper, recorder)))


def graphs_of(decoder: TorchDecoder, cache: KVCache) -> DecodeGraphs:
    graphs = decoder.graphs(cache)
    assert graphs is not None
    return graphs


@pytest.mark.parametrize(
    ("forwards", "sizes"),
    [
        (of_many(1, 5), (1,)),
        (of_many(2, 3), (2,)),
        (of_many(3, 4), (4,)),
        (of_many(11, 3), (16,)),
        (leaving(), (1, 2, 4, 8)),
        (short_then_long(), (4,)),
        (SCENES["rows that see each other"], (4,)),
    ],
)
def test_graphs_give_the_numbers_of_eager_forwards(
    plain: TorchDecoder, forwards: Forwards, sizes: tuple[int, ...]
) -> None:
    decoder, cache = graphed(plain, record), new_cache(plain)
    states = states_of(decoder, forwards, cache)
    assert (states - states_of(plain, forwards)).abs().max() <= TOLERANCE
    assert set(graphs_of(decoder, cache).captured) >= {*sizes}


def test_graphs_leave_the_cache_of_eager_forwards(plain: TorchDecoder) -> None:
    eager, cache = new_cache(plain), new_cache(plain)
    states_of(plain, leaving(), eager)
    states_of(graphed(plain, record), leaving(), cache)
    for layer in range(plain.config.num_layers):
        assert torch.allclose(cache.layer(layer), eager.layer(layer), rtol=0, atol=TOLERANCE)
        assert cache.pages(layer)[cache.spare].any(), "what fills up a graph is written somewhere"


def test_a_graph_is_captured_once_and_replayed_from_then_on(plain: TorchDecoder) -> None:
    recorder = Counted()
    states_of(graphed(plain, recorder), of_many(3, 5))
    # Prompts of one token are decode rows too.
    assert recorder.recorded == 2
    assert recorder.replayed == 2 + 4  # one of each against the eager result


@pytest.mark.parametrize("scene", [name for name in SCENES if name != "decode"])
def test_forwards_of_longer_runs_have_no_graph(plain: TorchDecoder, scene: str) -> None:
    recorder = Counted()
    forwards = [runs for runs in SCENES[scene] if any(len(run.tokens) > 1 for run in runs)]
    states_of(graphed(plain, recorder), forwards)
    assert recorder.recorded == 0


def test_more_rows_or_keys_than_a_graph_has_room_for_run_without(
    plain: TorchDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Counted()
    decoder = graphed(plain, recorder)
    one = np.zeros(1, np.int64)
    many = [[Run(one, 0, one + i, one[:0]) for i in range(257)]]
    assert len(states_of(decoder, many)) == 257
    assert recorder.recorded == 0
    monkeypatch.setattr(cuda_graphs, "MAX_KEYS", 256 + 30)
    paths = sequences(2, 40)
    states_of(decoder, [*prompts(paths, [15, 15]), *decode(paths, [15, 15], 2)])
    assert recorder.recorded == 0


def failing(_compute: Callable[[], Tensor]) -> Recorded:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_a_failed_capture_is_told_once_and_costs_nothing_else(
    plain: TorchDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    forwards = of_many(2, 4)[2:]
    states = states_of(graphed(plain, failing), forwards)
    assert torch.equal(states, states_of(graphed(plain, failing), forwards))
    assert (states - states_of(plain, forwards)).abs().max() <= TOLERANCE
    first, _second = caplog.messages
    assert "forwards of 2 rows" in first and "not permitted" in first


def test_a_graph_that_computes_something_else_is_refused(
    plain: TorchDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Counted(spoil=lambda output: output.mul_(1.2))
    states = states_of(graphed(plain, recorder), of_many(2, 4))
    assert (states - states_of(plain, of_many(2, 4))).abs().max() <= TOLERANCE
    assert recorder.replayed == recorder.recorded
    assert "off by 0.2" in caplog.text


class Exhausted(PagedWrapper):
    """A wrapper that has planned enough after some replays."""

    plans = 0

    def plan(self, *args: object, **arguments: object) -> None:
        if self._graph:
            self.plans += 1
            if self.plans > 3:
                raise RuntimeError("no more plans")
        super().plan(*args, **arguments)


def test_a_failed_replay_is_computed_without_and_told(
    plain: TorchDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = attending(plain, PagedAttention(setting_of(plain), Kit(Exhausted, record)))
    cache, forwards = new_cache(plain), of_many(2, 5)
    states = states_of(decoder, forwards, cache)
    assert (states - states_of(plain, forwards)).abs().max() <= TOLERANCE
    assert 2 not in graphs_of(decoder, cache).captured
    assert "its replay failed: RuntimeError: no more plans" in caplog.text


def test_nothing_is_captured_from_a_forward_that_is_not_finite(plain: TorchDecoder) -> None:
    recorder = Counted()
    decoder, cache = graphed(plain, recorder), new_cache(plain)
    paths = sequences(2, 20)
    states_of(decoder, prompts(paths, [10, 10]), cache)
    cache.layer(0)[int(paths[0].slots[4])] = float("nan")
    assert not states_of(decoder, decode(paths, [10, 10], 1), cache).isfinite().all()
    assert recorder.recorded == 0
    assert states_of(decoder, decode(paths[1:], [11], 2), cache).isfinite().all()
    assert recorder.recorded == 1


def test_one_sequence_that_is_not_finite_spoils_no_other(plain: TorchDecoder) -> None:
    decoder, cache, paths = graphed(plain, record), new_cache(plain), sequences(3, 20)
    states_of(decoder, [*prompts(paths, [10, 10, 10]), *decode(paths, [10, 10, 10], 2)], cache)
    cache.layer(0)[int(paths[0].slots[4])] = float("nan")
    states = states_of(decoder, decode(paths, [12, 12, 12], 1), cache)
    assert not states[0].isfinite().all() and states[1:].isfinite().all()
    later = states_of(decoder, decode(paths[1:], [13, 13], 1), cache)
    assert later.isfinite().all()


def test_every_cache_has_graphs_of_its_own_as_long_as_it_lives(plain: TorchDecoder) -> None:
    recorder = Counted()
    decoder, first, second = graphed(plain, recorder), new_cache(plain), new_cache(plain)
    forwards: Sequence[Sequence[Run]] = of_many(2, 3)[2:]
    for cache in (first, second, first, second):
        states_of(decoder, forwards, cache)
    assert recorder.recorded == 2
    graphs = graphs_of(decoder, first)
    assert graphs is not decoder.graphs(second) and graphs is decoder.graphs(first)
    assert len(decoder._graphs) == 2
    del first, cache
    gc.collect()
    # The tape of a CPU keeps the cache that it writes to; a CUDA graph keeps addresses alone.
    graphs._graphs.clear()
    gc.collect()
    assert len(decoder._graphs) == 1


def test_ranks_of_a_group_have_no_graphs(plain: TorchDecoder) -> None:
    paged = PagedAttention(setting_of(plain), Kit(PagedWrapper, record))
    rank = TorchDecoder(
        plain.config,
        plain.embedding,
        list(plain.blocks),
        plain.norm,
        plain.head,
        reduce=lambda partial: partial.clone(),
        choose=lambda _setting, _kv_dtype: paged,
    )
    assert rank.graphs(new_cache(plain)) is None
    forwards = of_many(2, 2)
    assert (states_of(rank, forwards) - states_of(plain, forwards)).abs().max() <= TOLERANCE


def test_the_spare_slot_is_beside_the_others(plain: TorchDecoder) -> None:
    cache = KVCache(plain.config, NUM_SLOTS, torch.float64)
    assert cache.spare == NUM_SLOTS == len(cache.layer(0))
    assert cache.pages(0).shape == (NUM_SLOTS + 1, 2, 1, 2, 64)
    assert cache.pages(0).data_ptr() == cache.layer(0).data_ptr()


def test_the_choice_reaches_the_graphs(
    plain: TorchDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    states_of(graphed(plain, record), of_many(3, 2))
    assert "captured a CUDA graph for forwards of 4 rows" in caplog.text
