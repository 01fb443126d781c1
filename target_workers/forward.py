"""The model behind a TargetEngine: runs in, chosen tokens out. Here the engine meets torch."""

from collections.abc import Sequence

import numpy as np
import torch

from protos.messages import PROTOCOL, Hello
from target_workers.config import TargetConfig
from target_workers.engine import TargetEngine
from target_workers.model import batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import load_decoder, model_hash
from target_workers.model.noise import as_int64
from target_workers.model.sampling import choose
from target_workers.model.self_test import exact_self_test
from target_workers.pages import Slots
from target_workers.rows import Draws, Run

SELF_TEST_SEED = 0

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


class DecoderForward:
    """A Forward over a decoder and its cache."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache

    def move(self, source: Slots, target: Slots) -> None:
        self._cache.move(torch.from_numpy(source), torch.from_numpy(target))

    def choose(self, runs: Sequence[Run], draws: Draws) -> tuple[list[int], list[bool]]:
        rows = batch.build_batch(
            [batch.Run(np.asarray(r.tokens), r.start, r.slots, r.history) for r in runs]
        )
        hidden = self._decoder.hidden(rows, self._cache)  # [rows, hidden]
        if not draws.rows:
            return [], []
        logits = self._decoder.logits(hidden[torch.tensor(draws.rows)])  # [draws, vocab]
        choice = choose(
            logits,
            torch.tensor(draws.temperatures, dtype=torch.float64),
            as_int64(draws.seeds),
            torch.tensor(draws.positions),
        )
        return choice.tokens.tolist(), choice.finite.tolist()


def load_target(config: TargetConfig, *, vocab_hash: str, incarnation: int) -> TargetEngine:
    """Load a model into an engine. Raises ModelError and ExactModeError."""
    dtype = DTYPES[config.dtype]
    decoder = load_decoder(config.path, dtype=dtype, exact=config.exact, device=config.device)
    # Bits that depend on the number of threads forbid changing it between steps.
    may_change = exact_self_test(decoder, SELF_TEST_SEED) if config.exact else True
    cache = KVCache(decoder.config, config.page_size * config.num_pages, dtype, config.device)
    hello = Hello(
        PROTOCOL,
        "target",
        incarnation,
        model_hash(config.path),
        vocab_hash,
        decoder.config.vocab_size,
        min(config.max_context, decoder.config.max_context),
        config.page_size,
        config.num_pages,
        config.max_rows,
    )
    set_cores = torch.set_num_threads if may_change else _keep_cores
    return TargetEngine(hello, DecoderForward(decoder, cache), set_cores)


def _keep_cores(_cores: int) -> None:
    """Leave the number of threads as it is."""
