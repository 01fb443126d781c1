"""The model behind a TargetEngine: runs in, chosen tokens out. Here the engine meets torch."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from protos.messages import PROTOCOL, Hello
from protos.worker import GroupBroken
from target_workers.config import TargetConfig
from target_workers.engine import TargetEngine
from target_workers.group import Group
from target_workers.model.batch import build_batch
from target_workers.model.config import ModelConfig
from target_workers.model.decoder import Decoder
from target_workers.model.files import model_hash
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import DTYPES, Part, load_decoder
from target_workers.model.noise import as_int64
from target_workers.model.run import Run
from target_workers.model.sampling import Choice, choose, only_known
from target_workers.model.self_test import exact_self_test
from target_workers.model.shard import Shard, portion
from target_workers.pages import Slots
from target_workers.room import check_room, free_bytes
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
        choice = _chosen(logits, draws, self._vocab_size)
        return choice.tokens.tolist(), choice.finite.tolist()


class RankForward:
    """A Forward over one rank's part of a decoder: the first rank chooses, the others hear what.

    `widths` are the tokens whose logits each rank gives. What fails here ends the group, since the
    other ranks cannot know of it otherwise.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        vocab_size: int,
        group: Group,
        widths: Sequence[int],
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._vocab_size = vocab_size
        self._group = group
        self._widths = widths

    def move(self, source: Slots, target: Slots) -> None:
        self._cache.move(torch.from_numpy(source), torch.from_numpy(target))

    def choose(self, runs: Sequence[Run], draws: Draws) -> tuple[list[int], list[bool]]:
        try:
            return self._choose(runs, draws)
        except GroupBroken:
            raise
        except Exception as error:
            raise self._group.failed(error) from error

    def _choose(self, runs: Sequence[Run], draws: Draws) -> tuple[list[int], list[bool]]:
        hidden = self._decoder.hidden(build_batch(runs), self._cache)  # [rows, hidden]
        self._group.settle()
        if not draws.rows:
            return [], []
        own = self._decoder.logits(hidden[torch.tensor(draws.rows)])  # [draws, own tokens]
        logits = self._group.join_columns(own, self._widths)
        tokens = torch.empty(len(draws.rows), dtype=torch.int64)
        if logits is not None:
            tokens = _chosen(logits, draws, self._vocab_size).tokens
        tokens = self._group.spread(tokens)
        # A row without finite logits has no token.
        return tokens.tolist(), (tokens >= 0).tolist()


def _chosen(logits: Tensor, draws: Draws, vocab_size: int) -> Choice:
    return choose(
        only_known(logits, vocab_size),
        torch.tensor(draws.temperatures, dtype=torch.float64),
        as_int64(draws.seeds),
        torch.tensor(draws.positions),
    )


def load_target(config: TargetConfig, *, vocab_hash: str, incarnation: int) -> TargetEngine:
    """Load a model, or one rank's part, into an engine. Raises ModelError and ExactModeError."""
    shape = ModelConfig.from_folder(config.path)
    vocab_size = min(config.vocab_size or shape.vocab_size, shape.vocab_size)
    hello = Hello(
        PROTOCOL,
        "target",
        incarnation,
        revision(config),
        vocab_hash,
        vocab_size,
        min(config.max_context, shape.max_context),
        config.page_size,
        config.num_pages,
        config.max_rows,
    )
    if config.shard.size > 1:
        return _load_rank(config, shape, hello)
    decoder, cache, set_cores = _load(config, Part())
    return TargetEngine(hello, DecoderForward(decoder, cache, vocab_size), set_cores)


def revision(config: TargetConfig) -> str:
    """Of the model and of the types it is computed and kept in, which decide its tokens."""
    kinds = (config.dtype, config.weight_dtype or config.dtype, config.kv_dtype or config.dtype)
    return hashlib.sha256(" ".join((model_hash(config.path), *kinds)).encode()).hexdigest()[:32]


def _load_rank(config: TargetConfig, shape: ModelConfig, hello: Hello) -> TargetEngine:
    shards = [Shard(rank, config.shard.size) for rank in range(config.shard.size)]
    widths = [len(portion(shape, shard).vocab) for shard in shards]
    group = Group(
        config.shard, host=config.host, device=config.device, timeout_s=config.rank_timeout_s
    )
    # Without a group, as here, its sums are the rank's own part: what the self-test compares.
    decoder, cache, set_cores = _load(config, Part(config.shard, group.reduce))
    forward = RankForward(decoder, cache, hello.vocab_size, group, widths)
    return TargetEngine(replace(hello, group_port=group.port), forward, set_cores, peers=group)


def _load(config: TargetConfig, part: Part) -> tuple[Decoder, KVCache, Callable[[int], None]]:
    """A decoder that passed its self-test, its cache, and how its threads are set between steps."""
    dtype = DTYPES[config.dtype]
    kv_dtype = (DTYPES | {"int8": torch.int8})[config.kv_dtype or config.dtype]
    decoder = load_decoder(
        config.path,
        dtype=dtype,
        device=config.device,
        part=part,
        int8=config.weight_dtype == "int8",
    )
    decoder.compile(kv_dtype)
    # Bits that depend on the number of threads forbid changing it between steps.
    may_change = not config.exact or exact_self_test(
        decoder, SELF_TEST_SEED, config.threads, kv_dtype
    )
    check_room(config, decoder.config, free_bytes(config.device))
    cache = KVCache(decoder.config, config.page_size * config.num_pages, kv_dtype, config.device)
    return decoder, cache, torch.set_num_threads if may_change else _keep_cores


def _keep_cores(_cores: int) -> None:
    """Leave the number of threads as it is."""
