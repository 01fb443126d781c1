"""A decoder on CPU kernels: the same interface as the torch one, and exact by construction.

Activations are float32 between kernels; where the CPU multiplies pairs of bfloat16 the inputs of
linear maps are rounded to it.
"""

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numba
import numpy as np
import torch
from torch import Tensor

from target_workers.model.batch import RowBatch, build_batch
from target_workers.model.config import ModelConfig, ModelError
from target_workers.model.kv_cache import KVCache
from target_workers.model.layers import Block, Linear, Reduce, RMSNorm, Rotary, whole
from target_workers.model.native import compiling, forget_kernels
from target_workers.model.native.block import Kind, Norm, Rows, Weights, make_rows, run_block
from target_workers.model.native.chunk import Cached
from target_workers.model.native.elementwise import add_and_norm
from target_workers.model.native.linear import Packed, as_array, linear, pack, pack_gated
from target_workers.model.native.llvm import PANEL, has_pair_dot
from target_workers.model.native.place import Heads
from target_workers.model.run import IntArray, Run

log = logging.getLogger(__name__)

NO_SCALES = np.empty((0, 0, 0), np.float32)


class Packer:
    """Packs the parts of a decoder for one kind of weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, as_int8: bool) -> None:
        self.in_pairs = dtype is torch.bfloat16 and has_pair_dot()
        self._as_int8 = as_int8
        self._config = config
        rotary = Rotary(config, torch.float32)
        self._cos, self._sin = rotary.cos.numpy(), rotary.sin.numpy()

    def block(self, block: Block) -> Weights:
        """The weights of a block, which needs its own no more."""
        norm = block.qk_norm
        heads = Heads(
            np.empty((0, 0), np.float32) if norm is None else norm.weight.float().numpy(),
            0.0 if norm is None else norm.eps,
            self._cos,
            self._sin,
            self._config.head_dim**-0.5,
        )
        return Weights(
            attention_norm=self.norm(block.attention_norm),
            qkv=self.linear(block.qkv),
            heads=heads,
            out=self.linear(block.out),
            mlp_norm=self.norm(block.mlp_norm),
            gate_up=self.linear(block.gate_up, pack_gated),
            down=self.linear(block.down),
        )

    def norm(self, norm: RMSNorm) -> Norm:
        return Norm(norm.weight.float().numpy(), norm.eps)

    def linear(self, linear: Linear, how: Callable[..., Packed] = pack) -> Packed:
        return how(linear.weight.data, linear.bias, in_pairs=self.in_pairs, as_int8=self._as_int8)


@dataclass(frozen=True, slots=True)
class Parts:
    """The weights of a decoder; its head gives `outputs` logits."""

    embedding: Tensor
    blocks: Sequence[Weights]
    norm: Norm
    head: Packed
    outputs: int


class NativeDecoder:
    """A Decoder whose rows' bits depend on their paths alone."""

    is_exact = True

    def __init__(
        self, config: ModelConfig, parts: Parts, *, in_pairs: bool, reduce: Reduce = whole
    ) -> None:
        self.config = config
        self.dtype = parts.embedding.dtype
        self._parts = parts
        self._in_pairs = in_pairs
        self._reduce = reduce

    def compile(self, kv_dtype: torch.dtype) -> None:
        """Have every kernel compiled, for a cache of this type, before the first request.

        One process at a time: two that keep kernels at once may take each other's. Raises
        ModelError where kernels of two threads would end the process.
        """
        with compiling():
            try:
                self._compile(kv_dtype)
            except (EOFError, pickle.UnpicklingError) as error:
                log.warning("kernels that were kept are broken (%s); compiling them anew", error)
                forget_kernels()
                self._compile(kv_dtype)
        if numba.threading_layer() == "workqueue":
            raise ModelError("the kernels need OpenMP: install libgomp (or the package tbb)")

    def _compile(self, kv_dtype: torch.dtype) -> None:
        """Call every kernel."""
        run = Run(np.zeros(1, np.int64), 0, np.zeros(1, np.int64), np.zeros(0, np.int64))
        states = self.stream(build_batch([run]), KVCache(self.config, 1, kv_dtype))
        self.logits(self.normed(next(islice(states, 1, None))))

    def stream(self, batch: RowBatch, cache: KVCache) -> Iterator[Tensor]:
        """The residual stream, float32 [rows, hidden], after the embedding and after each block.

        A block runs when its result is asked for: stop early to run the first blocks only, or pick
        states on the way. Keys and values of the blocks that ran are in the cache.
        """
        rows = self._rows(batch, cache)
        yield torch.from_numpy(rows.x.copy())
        for index in range(self.config.num_layers):
            self._run(rows, index, cache)
            yield torch.from_numpy(rows.x + rows.delta)

    def hidden(self, batch: RowBatch, cache: KVCache) -> Tensor:
        """Normed hidden states, float32 [rows, hidden], of the last block."""
        rows = self._rows(batch, cache)
        for index in range(self.config.num_layers):
            self._run(rows, index, cache)
        out = np.empty_like(rows.x)
        add_and_norm(rows.x, rows.delta, *self._parts.norm, out, rows.threads)
        return torch.from_numpy(out)

    def normed(self, x: Tensor) -> Tensor:
        """The final norm of a residual stream, as `logits` wants it."""
        x = x.clone()
        out = torch.empty_like(x)
        nothing = torch.zeros_like(x)
        add_and_norm(x.numpy(), nothing.numpy(), *self._parts.norm, out.numpy(), _threads())
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, vocab] of normed hidden states [n, hidden]."""
        taken = as_array(hidden.bfloat16()) if self._in_pairs else hidden.numpy()
        logits = torch.empty((len(hidden), self._parts.outputs))
        linear(self._parts.head, taken, logits.numpy(), _threads())
        return logits

    def _rows(self, batch: RowBatch, cache: KVCache) -> Rows:
        # No kernel looks whether it is told the truth.
        assert all(run.end <= self.config.max_context for run in batch.runs), "beyond the context"
        assert all(_within(run.slots, cache) and _within(run.history, cache) for run in batch.runs)
        x = self._parts.embedding[batch.tokens].float().numpy()
        pairs_keys = self._in_pairs and self.config.head_dim % PANEL == 0
        kind = Kind(self._in_pairs, pairs_keys and cache.dtype is torch.bfloat16)
        return make_rows(x, batch, self.config, kind, _threads())

    def _run(self, rows: Rows, index: int, cache: KVCache) -> None:
        run_block(rows, self._parts.blocks[index], self._cached(cache, index), self._reduce)

    def _cached(self, cache: KVCache, index: int) -> Cached:
        scales = cache.layer_scales(index)
        held = NO_SCALES if scales is None else scales.numpy()
        return Cached(as_array(cache.layer(index)), held, self.config.window(index))


def _within(slots: IntArray, cache: KVCache) -> bool:
    return not len(slots) or (slots.min() >= 0 and slots.max() < cache.num_slots)


def _threads() -> int:
    """As many as torch is set to use, which the orchestrator changes between steps."""
    threads = min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(threads)
    return threads
