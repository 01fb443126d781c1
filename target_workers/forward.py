"""The model behind a TargetEngine: runs in, chosen tokens out. Here the engine meets torch."""

from collections.abc import Sequence

import torch

from protos.messages import PROTOCOL, Hello
from target_workers.config import TargetConfig
from target_workers.engine import TargetEngine
from target_workers.model.batch import build_batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import DTYPES, load_decoder, model_hash
from target_workers.model.noise import as_int64
from target_workers.model.run import Run
from target_workers.model.sampling import choose, only_known
from target_workers.model.self_test import exact_self_test
from target_workers.pages import Slots
from target_workers.rows import Draws

SELF_TEST_SEED = 0


class DecoderForward:
    """A Forward over a decoder and its cache; it chooses among ids below `vocab_size`."""

    def __init__(self, decoder: Decoder, cache: KVCache, vocab_size: int) -> None:
        self._decoder = decoder
        self._cache = cache
        self._vocab_size = vocab_size

    def move(self, source: Slots, target: Slots) -> None:
        self._cache.move(torch.from_numpy(source), torch.from_numpy(target))

    def choose(self, runs: Sequence[Run], draws: Draws) -> tuple[list[int], list[bool]]:
        hidden = self._decoder.hidden(build_batch(runs), self._cache)  # [rows, hidden]
        if not draws.rows:
            return [], []
        logits = self._decoder.logits(hidden[torch.tensor(draws.rows)])  # [draws, vocab]
        choice = choose(
            only_known(logits, self._vocab_size),
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
    may_change = not config.exact or exact_self_test(decoder, SELF_TEST_SEED, config.threads)
    vocab_size = min(config.vocab_size or decoder.config.vocab_size, decoder.config.vocab_size)
    cache = KVCache(decoder.config, config.page_size * config.num_pages, dtype, config.device)
    hello = Hello(
        PROTOCOL,
        "target",
        incarnation,
        model_hash(config.path),
        vocab_hash,
        vocab_size,
        min(config.max_context, decoder.config.max_context),
        config.page_size,
        config.num_pages,
        config.max_rows,
    )
    set_cores = torch.set_num_threads if may_change else _keep_cores
    return TargetEngine(hello, DecoderForward(decoder, cache, vocab_size), set_cores)


def _keep_cores(_cores: int) -> None:
    """Leave the number of threads as it is."""
