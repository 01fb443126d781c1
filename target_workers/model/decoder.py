"""The decoder: rows of a batch in, hidden states and logits out, keys and values into the cache."""

from collections.abc import Iterator, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from target_workers.model.attention import Attention, Setting
from target_workers.model.attention_choice import Choose, choose_attention
from target_workers.model.batch import RowBatch
from target_workers.model.config import ModelConfig
from target_workers.model.cuda_graphs import DecodeGraphs
from target_workers.model.kv_cache import KVCache
from target_workers.model.layers import Attend, Block, Linear, Reduce, RMSNorm, Rotary, whole


class Decoder(Protocol):
    """A decoder-only transformer over ragged rows, or one rank's part of it.

    A part's `config` is that of its own heads and columns, and its logits are those of its rows of
    the vocabulary. `is_exact`: made so that a row's bits depend on its path alone.
    """

    config: ModelConfig
    dtype: torch.dtype
    is_exact: bool

    def compile(self, kv_dtype: torch.dtype) -> None:
        """Do before the first request what else it would wait for, for a cache of this type."""
        ...

    def stream(self, batch: RowBatch, cache: KVCache) -> Iterator[Tensor]:
        """The residual stream [rows, hidden] after the embedding and after each block, in turn.

        A block runs when its result is asked for: stop early to run the first blocks only, or pick
        states on the way. Keys and values of the blocks that ran are in the cache.
        """
        ...

    def hidden(self, batch: RowBatch, cache: KVCache) -> Tensor:
        """Normed hidden states [rows, hidden] of the last block."""
        ...

    def normed(self, x: Tensor) -> Tensor:
        """The final norm of a residual stream, as `logits` wants it."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, rows of the head], on the CPU, of normed hidden states [n, hidden]."""
        ...


class TorchDecoder(nn.Module):
    """A Decoder of torch's own operators: the reference, and what runs on CUDA.

    `reduce` gives a part the sums over all ranks; `choose` the attention over a type of cache.
    """

    is_exact = False

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        blocks: Sequence[Block],
        norm: RMSNorm,
        head: Linear,
        reduce: Reduce = whole,
        choose: Choose = choose_attention,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = embedding.dtype
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        self.reduce = reduce
        self.rotary = Rotary(config, embedding.dtype)
        self._choose = choose
        self._attentions: dict[torch.dtype, Attention] = {}
        self._graphs: WeakKeyDictionary[KVCache, DecodeGraphs | None] = WeakKeyDictionary()

    def compile(self, kv_dtype: torch.dtype) -> None:
        self.attention(kv_dtype)  # torch's operators are compiled already

    def attention(self, kv_dtype: torch.dtype) -> Attention:
        """What attends over caches of this type, chosen when first asked for."""
        if kv_dtype not in self._attentions:
            setting = Setting(self.config, self.dtype, self.embedding.device)
            self._attentions[kv_dtype] = self._choose(setting, kv_dtype)
        return self._attentions[kv_dtype]

    def graphs(self, cache: KVCache) -> DecodeGraphs | None:
        """The CUDA graphs of forwards over this cache, which live as long as it does."""
        if cache not in self._graphs:
            # Sums over ranks are not of this device alone: a graph cannot hold them.
            may = self.reduce is whole
            graphs = self.attention(cache.dtype).graphs(self.run) if may else None
            self._graphs[cache] = graphs
        return self._graphs[cache]

    @torch.inference_mode()
    def stream(self, batch: RowBatch, cache: KVCache) -> Iterator[Tensor]:
        batch, attend = self.attention(cache.dtype).prepare(batch, cache)
        yield from self._stream(batch.tokens, batch.positions, attend)

    @torch.inference_mode()
    def hidden(self, batch: RowBatch, cache: KVCache) -> Tensor:
        def eager() -> Tensor:
            rows, attend = self.attention(cache.dtype).prepare(batch, cache)
            return self.run(rows.tokens, rows.positions, attend)

        graphs = self.graphs(cache)
        return eager() if graphs is None else graphs.hidden(batch, cache, eager)

    def _stream(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Iterator[Tensor]:
        angles = self.rotary(positions)
        x = self.embedding[tokens]
        yield x
        for block in self.blocks:
            x = block(x, angles, attend, self.reduce)
            yield x

    def run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed hidden states [rows, hidden] of tokens [rows], whatever they attend to.

        With gradients, where they are enabled.
        """
        for x in self._stream(tokens, positions, attend):
            last = x
        normed: Tensor = self.norm(last)
        return normed

    @torch.inference_mode()
    def normed(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits.float().cpu()
