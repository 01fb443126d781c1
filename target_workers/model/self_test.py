"""The start-up proof of exact mode: a row alone and the row in any batch give the same bits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from target_workers.model.batch import build_batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.native.chunk import CHUNK
from target_workers.model.run import IntArray, Run

BLOCKS = 2  # every block calls the same kernels on the same shapes
ROWS_ALONE = 12
EDGE = 2 * CHUNK  # of a chunk of keys that is not the first
SCRATCH_SLOTS = 3 * EDGE


class ExactModeError(Exception):
    """Equal bits cannot be had here: the message names what differed and what to do."""


@torch.inference_mode()
def exact_self_test(
    decoder: Decoder,
    seed: int,
    threads: Sequence[int] = (),
    kv_dtype: torch.dtype | None = None,
) -> bool:
    """Compare rows of a random batch with the same rows in other company, bit for bit.

    The batch mixes prefill, decode and tree rows with contexts on both sides of blocks of keys;
    what came before is random keys and values, kept as `kv_dtype` (None: the decoder's type). All
    of it with each of these numbers of `threads` and as many as are set (none named: also with
    one). Returns whether that number may change between steps too. Raises ExactModeError.
    """
    if not decoder.is_exact:
        raise ExactModeError(
            "exact mode needs a CPU, bf16 or fp32, and heads of a multiple of 16; this model has"
            f" {decoder.dtype} and heads of {decoder.config.head_dim}; set target.exact = false"
        )
    generator = np.random.default_rng(seed)
    cache = KVCache(decoder.config, SCRATCH_SLOTS, kv_dtype or decoder.dtype)
    for layer in range(min(BLOCKS, decoder.config.num_layers)):
        random = torch.Generator().manual_seed(seed + layer)
        shape = (decoder.config.num_kv_heads, decoder.config.head_dim)
        keys, values = torch.randn(2, SCRATCH_SLOTS, *shape, generator=random)
        cache.write(layer, torch.arange(SCRATCH_SLOTS), keys, values)
    runs = _random_runs(decoder, generator)
    results = []
    for count in sorted({torch.get_num_threads(), *(threads or (1,))}):
        with _threads(count):
            results.append(_check(decoder, cache, runs, generator))
    return all(torch.equal(results[0], result) for result in results)


def _check(
    decoder: Decoder, cache: KVCache, runs: Sequence[Run], generator: np.random.Generator
) -> Tensor:
    """The rows of all runs together, after comparing them with smaller batches."""
    together = _forward(decoder, cache, runs)
    starts = np.cumsum([0, *(len(run.tokens) for run in runs)])
    for index in generator.permutation(len(runs)):
        rows = together[starts[index] : starts[index + 1]]
        _expect_equal(_forward(decoder, cache, [runs[index]]), rows, runs[index], "its run")
    for row in generator.choice(len(together), ROWS_ALONE):
        index = int(np.searchsorted(starts, row, side="right")) - 1
        alone = _alone(runs[index], int(row - starts[index]))
        _expect_equal(_forward(decoder, cache, [alone]), together[row : row + 1], alone, "no other")
    logits = decoder.logits(together[:ROWS_ALONE])
    for index, alone_logits in enumerate(
        map(decoder.logits, torch.split(together[:ROWS_ALONE], 1))
    ):
        _expect_equal(alone_logits, logits[index : index + 1], runs[0], "no other, in the head")
    return together


def _forward(decoder: Decoder, cache: KVCache, runs: Sequence[Run]) -> Tensor:
    """Normed rows after the first blocks: [rows, hidden]."""
    *_, last = islice(decoder.stream(build_batch(runs), cache), BLOCKS + 1)
    return decoder.normed(last)


def _expect_equal(got: Tensor, expected: Tensor, run: Run, company: str) -> None:
    if torch.equal(got, expected):
        return
    row = int((got != expected).any(-1).nonzero()[0, 0])
    worst = float((got.double() - expected.double()).abs().max())
    raise ExactModeError(
        f"the row at position {run.start + row} differs by up to {worst:.2g} between a mixed batch "
        f"and a batch with {company} rows, in {got.dtype} on {torch.get_num_threads()} threads; "
        "set target.exact = false, or try another target.dtype"
    )


def _random_runs(decoder: Decoder, generator: np.random.Generator) -> list[Run]:
    """Prefill from the start, a chunk over two edges, decode rows and a tree of three runs."""
    edge = EDGE + int(generator.integers(-6, 2))
    chunk = (edge - CHUNK, CHUNK + 11)
    shapes = [(0, 21), chunk, (40, 1), (edge, 1), (edge, 1), (EDGE - 3, 5)]
    limit, vocab = decoder.config.max_context, decoder.config.vocab_size
    history, free = np.split(generator.permutation(SCRATCH_SLOTS), [2 * EDGE])
    runs = []
    for start, count in shapes:
        start = max(min(start, limit - count), 0)
        count = min(count, limit)
        new, free = np.split(free, [count])
        tokens = generator.integers(0, vocab, count)
        runs.append(Run(tokens, start, new, generator.permutation(history)[:start]))
    path = runs[-1]
    for depth, count in ((1, 2), (3, 1)):
        new, free = np.split(free, [count])
        start = min(path.start + depth, limit - count)
        seen = np.concatenate((path.history, path.slots))[:start]
        runs.append(Run(generator.integers(0, vocab, count), start, new, seen))
    return runs


def _alone(run: Run, index: int) -> Run:
    """Row `index` of a run as a run of its own."""
    here = slice(index, index + 1)
    seen: IntArray = np.concatenate((run.history, run.slots[:index]))
    return Run(run.tokens[here], run.start + index, run.slots[here], seen)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
