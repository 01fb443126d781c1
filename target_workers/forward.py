"""The model behind a TargetEngine: runs in, chosen tokens out. Here the engine meets torch."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from protos.messages import PROTOCOL, Hello
from protos.sampling import Score
from protos.worker import GroupBroken
from target_workers.config import TargetConfig
from target_workers.deciding import decide, score_prompt
from target_workers.drawn import PACKED, Decided, Drawn, packed, unpacked
from target_workers.engine import TargetEngine
from target_workers.group import Group
from target_workers.model.batch import build_batch
from target_workers.model.chooser import Choosers, grammars_of
from target_workers.model.config import ModelConfig
from target_workers.model.decoder import Decoder
from target_workers.model.files import model_hash
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import DTYPES, Part, load_decoder
from target_workers.model.run import Run
from target_workers.model.self_test import exact_self_test
from target_workers.model.shard import Shard, portion
from target_workers.pages import Slots
from target_workers.room import check_room, free_bytes
from target_workers.rows import Draws, PromptRows

SELF_TEST_SEED = 0
PROMPT_ROWS = 256  # whose logits over the whole vocabulary are in memory at once


def _keep_cores(_cores: int) -> None:
    """Leave the number of threads as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A decoder that passed its self-test, its cache, and how its threads are set between steps."""

    decoder: Decoder
    cache: KVCache
    set_cores: Callable[[int], None] = _keep_cores


class DecoderForward:
    """A Forward over a decoder and its cache; it chooses among ids below `vocab_size`."""

    def __init__(self, loaded: Loaded, vocab_size: int) -> None:
        self._decoder = loaded.decoder
        self._cache = loaded.cache
        self.set_cores = loaded.set_cores
        self._vocab_size = vocab_size

    def move(self, source: Slots, target: Slots) -> None:
        self._cache.move(torch.from_numpy(source), torch.from_numpy(target))

    def decide(self, runs: Sequence[Run], draws: Draws) -> Decided:
        hidden = self._decoder.hidden(build_batch(runs), self._cache)  # [rows, hidden]
        drawn: Sequence[Drawn] = ()
        if draws.rows:
            logits = self._decoder.logits(hidden[torch.tensor(draws.rows)])  # [draws, vocab]
            drawn = decide(logits, draws, self._vocab_size)
        return Decided(drawn, [self._score(hidden, prompt) for prompt in draws.prompts])

    def _score(self, hidden: Tensor, prompt: PromptRows) -> tuple[Score, ...]:
        scores: list[Score] = []
        for piece in prompt.pieces(PROMPT_ROWS):
            logits = self._decoder.logits(hidden[piece.rows])  # [piece, vocab]
            scores += score_prompt(logits, piece, self._vocab_size)
        return tuple(scores)


class RankForward:
    """A Forward over one rank's part of a decoder: the first rank chooses, the others hear what.

    `widths` are the tokens whose logits each rank gives. What fails here ends the group, since the
    other ranks cannot know of it otherwise.
    """

    def __init__(
        self, loaded: Loaded, vocab_size: int, group: Group, widths: Sequence[int]
    ) -> None:
        self._decoder = loaded.decoder
        self._cache = loaded.cache
        self.set_cores = loaded.set_cores
        self._vocab_size = vocab_size
        self._group = group
        self._widths = widths

    def move(self, source: Slots, target: Slots) -> None:
        self._cache.move(torch.from_numpy(source), torch.from_numpy(target))

    def decide(self, runs: Sequence[Run], draws: Draws) -> Decided:
        try:
            return self._decide(runs, draws)
        except GroupBroken:
            raise
        except Exception as error:
            raise self._group.failed(error) from error

    def _decide(self, runs: Sequence[Run], draws: Draws) -> Decided:
        hidden = self._decoder.hidden(build_batch(runs), self._cache)  # [rows, hidden]
        self._group.settle()
        drawn: Sequence[Drawn] = ()
        if draws.rows:
            logits = self._logits(hidden[torch.tensor(draws.rows)])
            drawn = () if logits is None else decide(logits, draws, self._vocab_size)
            drawn = self._spread(draws, drawn)
        return Decided(drawn, [self._score(hidden, prompt) for prompt in draws.prompts])

    def _logits(self, hidden: Tensor) -> Tensor | None:
        """[n, vocab] at the first rank alone."""
        return self._group.join_columns(self._decoder.logits(hidden), self._widths)

    def _spread(self, draws: Draws, drawn: Sequence[Drawn]) -> Sequence[Drawn]:
        """What the first rank decided, at every rank; why and how surely only it can say."""
        words = [word for each in drawn for word in packed(each)]
        room = sum(PACKED + len(block.extend.nodes) for block in draws.blocks)
        numbers = torch.full((room,), -1, dtype=torch.int64)
        numbers[: len(words)] = torch.tensor(words, dtype=torch.int64)
        numbers = self._group.spread(numbers)
        return drawn if self._group.is_first else unpacked(numbers.tolist(), len(draws.blocks))

    def _score(self, hidden: Tensor, prompt: PromptRows) -> tuple[Score, ...]:
        scores: list[Score] = []
        for piece in prompt.pieces(PROMPT_ROWS):
            logits = self._logits(hidden[piece.rows])
            if logits is not None:
                scores += score_prompt(logits, piece, self._vocab_size)
        return tuple(scores)


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
    forward = DecoderForward(_load(config, Part()), vocab_size)
    return TargetEngine(hello, forward, _choosers(config, vocab_size))


def _choosers(config: TargetConfig, vocab_size: int) -> Choosers:
    return Choosers(vocab_size, grammars_of(Path(config.path), vocab_size))


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
    loaded = _load(config, Part(config.shard, group.reduce))
    forward = RankForward(loaded, hello.vocab_size, group, widths)
    hello = replace(hello, group_port=group.port)
    return TargetEngine(hello, forward, _choosers(config, hello.vocab_size), peers=group)


def _load(config: TargetConfig, part: Part) -> Loaded:
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
    return Loaded(decoder, cache, torch.set_num_threads if may_change else _keep_cores)
