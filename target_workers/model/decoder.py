"""The decoder: rows of a batch in, hidden states and logits out, keys and values into the cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from target_workers.model.attention import CachedAttention, plan_attention
from target_workers.model.batch import RowBatch
from target_workers.model.config import ModelConfig
from target_workers.model.kv_cache import KVCache
from target_workers.model.layers import Block, Linear, RMSNorm, Rotary


class Decoder(nn.Module):
    """A decoder-only transformer over ragged rows.

    In exact mode a row's bits depend on its path alone: see `fit_rows` and `exact_self_test`.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        blocks: Sequence[Block],
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = embedding.dtype
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        self.rotary = Rotary(config, embedding.dtype)
        self.least_rows = 1  # a batch is filled up once, not by each linear

    @torch.inference_mode()
    def stream(self, batch: RowBatch, cache: KVCache) -> Iterator[Tensor]:
        """The residual stream [rows, hidden] after the embedding and after each block, in turn.

        A block runs when its result is asked for: stop early to run the first blocks only, or pick
        states on the way. Keys and values of the blocks that ran are in the cache.
        """
        plan = plan_attention(batch.padded(self.least_rows), self.config, self.dtype)
        plan = plan.to(self.embedding.device)
        attend = CachedAttention(plan, cache)
        angles = self.rotary(plan.batch.positions)
        x = self.embedding[plan.batch.tokens]
        yield x[: batch.num_rows]
        for block in self.blocks:
            x = block(x, angles, attend)
            yield x[: batch.num_rows]

    @torch.inference_mode()
    def hidden(self, batch: RowBatch, cache: KVCache) -> Tensor:
        """Normed hidden states [rows, hidden] of the last block."""
        for x in self.stream(batch, cache):
            last = x
        return self.normed(last)

    @torch.inference_mode()
    def normed(self, x: Tensor) -> Tensor:
        """The final norm of a residual stream, as `logits` wants it."""
        normed: Tensor = self.norm(x)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, vocab], on the CPU, of normed hidden states [n, hidden]."""
        logits: Tensor = self.head(hidden)
        return logits.float().cpu()
