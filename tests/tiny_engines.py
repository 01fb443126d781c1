"""Both engines over tiny real models, with caches that can be looked into."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafter_workers.config import DrafterConfig, GrowthConfig
from drafter_workers.engine import DraftEngine
from drafter_workers.methods.small_model import SmallModel
from protos.messages import PROTOCOL, Hello
from protos.sampling import Sampling
from target_workers.engine import TargetEngine
from target_workers.forward import DecoderForward, Loaded
from target_workers.model.batch import build_batch
from target_workers.model.chooser import Choosers
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.run import IntArray, Run
from tests.duo import Duo

VOCAB = 512


@dataclass(frozen=True, slots=True)
class Target:
    """A target engine whose cache can be looked into."""

    engine: TargetEngine
    decoder: Decoder
    cache: KVCache

    def rows(self, seq: int, count: int) -> Tensor:
        """Keys and values of the sequence's first rows: [layers, count, 2, kv_heads, head_dim]."""
        return _rows(self.decoder, self.cache, self.engine._pages.slots(seq)[:count])


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter engine whose cache can be looked into."""

    engine: DraftEngine
    model: SmallModel
    cache: KVCache
    decoder: Decoder

    def rows(self, seq: int) -> Tensor:
        """Keys and values of all committed rows computed."""
        state = self.model._sequences[seq]
        return _rows(self.decoder, self.cache, state.slots[: state.computed])


def make_target(
    decoder: Decoder,
    page_size: int = 16,
    num_pages: int = 80,
    kv: torch.dtype | None = None,
    feature_size: int = 0,
) -> Target:
    dtype = kv or decoder.dtype
    cache = KVCache(decoder.config, page_size * num_pages, dtype, feature_size=feature_size)
    hello = Hello(PROTOCOL, "target", 1, "", "", VOCAB, 1000, page_size, num_pages, 512)
    engine = TargetEngine(hello, DecoderForward(Loaded(decoder, cache), VOCAB), Choosers(VOCAB))
    return Target(engine, decoder, cache)


def make_drafter(decoder: Decoder, width: int = 1, rank: str = "noise", feed: int = 64) -> Drafter:
    growth = GrowthConfig(width=width, floor=1e-300, feed_rows=feed)
    config = DrafterConfig("", num_slots=1200, max_context=1000, rank=rank, growth=growth)
    cache = KVCache(decoder.config, config.num_slots, decoder.dtype)
    model = SmallModel(decoder, cache, config)
    hello = Hello(PROTOCOL, "drafter", 1, "", "", VOCAB, 1000, 1, config.num_slots, 512)
    return Drafter(DraftEngine(hello, model, growth), model, cache, decoder)


def _rows(decoder: Decoder, cache: KVCache, slots: IntArray) -> Tensor:
    layers = [cache.layer(i)[torch.from_numpy(slots)] for i in range(decoder.config.num_layers)]
    return torch.stack(layers)


def prefill(decoder: Decoder, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows of a fresh cache, and the logits after every token."""
    cache = KVCache(decoder.config, len(tokens), decoder.dtype)
    slots = np.arange(len(tokens))
    hidden = decoder.hidden(build_batch([Run(np.array(tokens), 0, slots, slots[:0])]), cache)
    return _rows(decoder, cache, slots), decoder.logits(hidden)


def plain(
    decoder: Decoder,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    kv: torch.dtype | None = None,
) -> list[int]:
    """The target alone, one token a step."""
    duo = Duo(make_target(decoder, kv=kv).engine, k=0)
    line = duo.open(1, prompt, sampling)
    for _ in range(count):
        duo.round()
    return line.output
