"""Which rows are trained on when: a function of the corpora, the seed and the step alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
import torch
from torch import Tensor

from drafter_workers.training.corpus import Corpus, CorpusError, Span

SORTED_TOGETHER = 512  # crops whose lengths are compared, so that a batch has little padding
SHORTEST = 16  # tokens; shorter rests of documents are left out


@dataclass(frozen=True, slots=True)
class Crop:
    """A piece of one document of one corpus.

    What was kept of the target for a later piece was said in view of the earlier ones.
    """

    corpus: int
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of tokens from position 0 on, filled up to the longest; `parts` by name [rows, t, ...].

    `real` is False where a row is filled up, `answers` True where a token belongs to an answer.
    """

    tokens: Tensor  # int64 [rows, t]
    real: Tensor  # bool [rows, t]
    answers: Tensor  # bool [rows, t]
    parts: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Crops of at most `length` tokens, `tokens` of them in a batch, fill included."""

    length: int = 512
    tokens: int = 1024
    seed: int = 0
    held_out: float = 0.02

    def __post_init__(self) -> None:
        if not SHORTEST <= self.length <= self.tokens:
            raise ValueError(
                f"a batch of {self.tokens} tokens must hold a crop, of {SHORTEST} tokens at "
                f"least, is {self.length}"
            )
        if not 0 < self.held_out < 1:
            raise ValueError(f"the share held out must be between 0 and 1, is {self.held_out}")


class Batches:
    """The batches of a run, and those that are held out of it. Raises CorpusError."""

    def __init__(self, corpora: Sequence[Corpus], config: BatchConfig) -> None:
        self._corpora = corpora
        self._config = config
        self._parts = _common_parts(corpora)
        whole = [Crop(i, span) for i, corpus in enumerate(corpora) for span in corpus.documents]
        apart = np.random.default_rng([config.seed, len(whole)]).permutation(len(whole))
        first = max(1, round(config.held_out * len(whole)))
        self._held_out = list(self._cut([whole[i] for i in sorted(apart[:first])]))
        self._crops = list(self._cut([whole[i] for i in sorted(apart[first:])]))
        if not self._crops or not self._held_out:
            raise CorpusError(
                "the corpus has too few documents to train on some and hold out others; capture "
                "more tokens"
            )

    @cached_property
    def tokens(self) -> int:
        """Tokens of one epoch, without fill."""
        return sum(len(crop.span) for crop in self._crops)

    def steps(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Every `stride`th batch from step `start` on, without end; no other one is read."""
        epoch, begin, order = 0, 0, self._batches_of(0)
        for step in count(start, stride):
            while step >= begin + len(order):
                epoch, begin = epoch + 1, begin + len(order)
                order = self._batches_of(epoch)
            yield self._read(order[step - begin])

    def held_out(self, tokens: int) -> Iterator[Batch]:
        """Held-out documents, the same first ones each time, until there are so many tokens."""
        taken, total = list[Crop](), 0
        for crop in self._held_out:
            if total >= tokens:
                break
            taken.append(crop)
            total += len(crop.span)
        for crops in self._grouped(sorted(taken, key=lambda crop: len(crop.span))):
            yield self._read(crops)

    def _batches_of(self, epoch: int) -> list[list[Crop]]:
        chance = np.random.default_rng([self._config.seed, 1, epoch])
        mixed = [self._crops[i] for i in chance.permutation(len(self._crops))]
        batches: list[list[Crop]] = []
        for first in range(0, len(mixed), SORTED_TOGETHER):
            near = sorted(mixed[first : first + SORTED_TOGETHER], key=lambda crop: len(crop.span))
            batches += self._grouped(near)
        return [batches[i] for i in chance.permutation(len(batches))]

    def _cut(self, crops: Sequence[Crop]) -> Iterator[Crop]:
        """Pieces of at most the configured length."""
        for crop in crops:
            span = crop.span
            for begin in range(span.begin, span.end, self._config.length):
                end = min(begin + self._config.length, span.end)
                if end - begin >= SHORTEST:
                    yield Crop(crop.corpus, Span(span.shard, begin, end))

    def _grouped(self, ascending: Sequence[Crop]) -> Iterator[list[Crop]]:
        """Neighbours, as many as fill a batch."""
        group: list[Crop] = []
        for crop in ascending:
            if group and (len(group) + 1) * len(crop.span) > self._config.tokens:
                yield group
                group = []
            group.append(crop)
        if group:
            yield group

    def _read(self, crops: Sequence[Crop]) -> Batch:
        longest = max(len(crop.span) for crop in crops)
        tokens = torch.zeros((len(crops), longest), dtype=torch.int64)
        real = torch.zeros_like(tokens, dtype=torch.bool)
        answers = torch.zeros_like(real)
        parts: dict[str, Tensor] = {}
        for row, crop in enumerate(crops):
            corpus, size = self._corpora[crop.corpus], len(crop.span)
            tokens[row, :size] = torch.from_numpy(corpus.tokens(crop.span))
            answers[row, :size] = torch.from_numpy(corpus.answers(crop.span))
            real[row, :size] = True
            for name in self._parts:
                part = corpus.part(name, crop.span)
                if name not in parts:
                    parts[name] = part.new_zeros((len(crops), longest, *part.shape[1:]))
                parts[name][row, :size] = part
        return Batch(tokens, real, answers, parts)


def _common_parts(corpora: Sequence[Corpus]) -> tuple[str, ...]:
    """What is kept in all of them: of one target, and none twice. Raises CorpusError."""
    origins = [corpus.origin for corpus in corpora]
    if len({(origin.target_hash, origin.kept) for origin in origins}) != 1:
        raise CorpusError(
            "the corpora are of different targets or keep different things; capture them with the "
            "same --target, --keep and --top, or leave some out"
        )
    if len(set(origins)) < len(origins):
        raise CorpusError(
            "two of the corpora are the same documents: what is held out of one is in the other; "
            "leave one out, or capture it with another --seed"
        )
    return origins[0].kept.parts
