"""Decode forwards replayed as CUDA graphs: one launch in place of hundreds. Not yet run on a GPU.

A graph is for a fixed number of rows and reads all that changes from memory that stays where it is.
Rows that only fill it up are one-token sequences in the cache's spare slot, so that nobody reads
what they write. What cannot be captured, or comes out wrong, is computed without, and told once.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from target_workers.model.batch import RowBatch, build_batch
from target_workers.model.kv_cache import KVCache
from target_workers.model.layers import Attend
from target_workers.model.run import Run

log = logging.getLogger(__name__)

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_KEYS = 1 << 22  # keys of all rows of a forward; their slots are 16 MiB
WARM_UPS = 2  # forwards before the capture: libraries set themselves up in the first
# Another number of rows, other kernels: hidden states in bf16 differ by a hundredth or so.
AGREEMENT = 0.1

Compute: TypeAlias = Callable[[Tensor, Tensor, Attend], Tensor]
"""From tokens [rows], positions [rows] and their attention to normed hidden states."""


class Fixed(Protocol):
    """Attention over memory that stays where it is, for runs of one row and so many of them."""

    def plan(self, runs: Sequence[Run]) -> None:
        """Set that memory for these runs."""
        ...

    def over(self, slots: Tensor, cache: KVCache) -> Attend:
        """Attention of rows that are written to `slots` [rows] of a cache."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A computation that `replay` does again, its result in the same `output`."""

    output: Tensor
    replay: Callable[[], None]


Record: TypeAlias = Callable[[Callable[[], Tensor]], Recorded]


class Recorder:
    """The Record of a CUDA device. Its graphs share one pool of memory: they never run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Recorded:
        side = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                compute()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # A drafter in the same process may be at work on the device from its own thread.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        return Recorded(output, graph.replay)


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """One number of rows: where their inputs are, what plans them and what computes them."""

    inputs: Tensor  # [3, rows]: tokens, positions, slots
    attention: Fixed
    recorded: Recorded

    def replay(self, batch: RowBatch, spare: int) -> Tensor:
        """Hidden states of the batch's own rows."""
        _fill(self.inputs, self.attention, batch, spare)
        self.recorded.replay()
        return self.recorded.output[: len(batch.tokens)].clone()


class DecodeGraphs:
    """The graphs of one decoder over one cache, captured when first wanted."""

    def __init__(
        self, compute: Compute, fixed: Callable[[int], Fixed], record: Record, device: torch.device
    ) -> None:
        self._compute = compute
        self._fixed = fixed
        self._record = record
        self._device = device
        self._graphs: dict[int, _Graph | None] = {}  # None: refused for good

    @property
    def captured(self) -> tuple[int, ...]:
        """The numbers of rows there are graphs for."""
        return tuple(sorted(count for count, graph in self._graphs.items() if graph is not None))

    def hidden(self, batch: RowBatch, cache: KVCache, eager: Callable[[], Tensor]) -> Tensor:
        """Normed hidden states [rows, hidden] of a batch, by a graph if it fits one."""
        count = _row_count(batch)
        if count and count not in self._graphs:
            return self._first(count, batch, cache, eager)
        graph = self._graphs.get(count)
        if graph is None:
            return eager()
        try:
            return graph.replay(batch, cache.spare)
        except Exception as error:  # whatever it is, the forward can still be computed
            self._refuse(count, f"its replay failed: {type(error).__name__}: {error}")
            return eager()

    def _first(
        self, count: int, batch: RowBatch, cache: KVCache, eager: Callable[[], Tensor]
    ) -> Tensor:
        """The eager result, with which the graph that is captured on the way has to agree."""
        expected = eager()
        if not bool(expected.isfinite().all()):
            return expected  # nothing can be told from it
        try:
            graph = self._capture(count, batch, cache)
            off = _difference(graph.replay(batch, cache.spare), expected)
        except Exception as error:  # no graph is worse than slow, whatever the reason
            self._refuse(count, f"{type(error).__name__}: {error}")
            return expected
        if not off <= AGREEMENT:  # NaN neither
            self._refuse(count, f"its result is off by {off:.2g} of the eager one")
            return expected
        self._graphs[count] = graph
        log.info("captured a CUDA graph for forwards of %d rows", count)
        return expected

    def _capture(self, count: int, batch: RowBatch, cache: KVCache) -> _Graph:
        inputs = torch.zeros((3, count), dtype=torch.int64, device=self._device)
        fixed = self._fixed(count)
        # What is computed for the capture is this batch's, so it writes what is written already.
        _fill(inputs, fixed, batch, cache.spare)
        tokens, positions, slots = inputs.unbind(0)
        attend = fixed.over(slots, cache)
        recorded = self._record(lambda: self._compute(tokens, positions, attend))
        return _Graph(inputs, fixed, recorded)

    def _refuse(self, count: int, reason: str) -> None:
        self._graphs[count] = None
        log.warning("no CUDA graph for forwards of %d rows, they run without: %s", count, reason)


def _row_count(batch: RowBatch) -> int:
    """The rows of the graph that a batch fits; 0 if none does."""
    runs, rows = batch.runs, len(batch.tokens)
    if len(runs) < rows or rows > ROW_COUNTS[-1]:
        return 0
    if sum(run.end for run in runs) + ROW_COUNTS[-1] > MAX_KEYS:
        return 0
    return next(count for count in ROW_COUNTS if count >= rows)


def _fill(inputs: Tensor, attention: Fixed, batch: RowBatch, spare: int) -> None:
    """Set a graph's inputs and plan for a batch, and for what fills it up."""
    own = np.zeros(1, np.int64)
    filler = Run(own, 0, own + spare, own[:0])
    padded = build_batch([*batch.runs, *[filler] * (inputs.shape[1] - len(batch.tokens))])
    inputs.copy_(torch.stack((padded.tokens, padded.positions, padded.slots)))
    attention.plan(padded.runs)


def _difference(got: Tensor, expected: Tensor) -> float:
    """How long the difference is, as a part of what was expected."""
    wide = expected.double()
    return float((got.double() - wide).norm() / wide.norm())
