"""Batches that the student writes itself, for the teacher to score: it then learns where it goes
wrong, not only where the target has been (Agarwal et al. 2024)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from drafter_workers.training.batches import Batch
from drafter_workers.training.capture import Capture, CaptureConfig
from drafter_workers.training.conversation import Plan, Turn
from drafter_workers.training.corpus import Document
from drafter_workers.training.loop import Source
from target_workers.model.batch import RowBatch
from target_workers.model.decoder import TorchDecoder
from target_workers.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class OnPolicyConfig:
    """The share of batches the student writes; `tokens` of an answer, of rows up to `length`."""

    share: float
    ends: frozenset[int]
    tokens: int = 64
    length: int = 512
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"the share of own batches must be from 0 to 1, is {self.share}")


class OnPolicy:
    """A Source that answers some of another's batches anew, by the student as it is then."""

    def __init__(
        self, source: Source, student: TorchDecoder, ids: Sequence[int], config: OnPolicyConfig
    ) -> None:
        self._source = source
        self._writer = _WholeVocabulary(student, torch.tensor(ids))
        self._config = config

    def steps(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """The source's batches; whether one is answered anew depends on its step alone."""
        for step, batch in zip(
            count(start, stride), self._source.steps(start, stride), strict=False
        ):
            chance = np.random.default_rng([self._config.seed, 2, step])
            anew = chance.random() < self._config.share
            yield self._answer(batch, int(chance.integers(1 << 62))) if anew else batch

    def held_out(self, tokens: int) -> Iterator[Batch]:
        return self._source.held_out(tokens)

    def _answer(self, batch: Batch, seed: int) -> Batch:
        """The same questions with the student's answers."""
        plans = list(self._plans(batch, seed))
        if not plans:
            return batch
        vocab = self._writer.config.vocab_size
        config = CaptureConfig(vocab, self._config.ends, len(plans), self._config.length)
        written: list[Document] = []
        Capture(self._writer, config, self._writer.dtype).run(iter(plans), written.append)
        return _laid_out(sorted(written, key=lambda document: document.number))

    def _plans(self, batch: Batch, seed: int) -> Iterator[Plan]:
        """A row's tokens up to its first answer, as far as it has one."""
        rows = zip(batch.tokens, batch.answers.int().argmax(1).tolist(), strict=True)
        for number, (tokens, first) in enumerate(rows):
            if 0 < first < self._config.length:
                given = tuple(tokens[:first].tolist())
                turn = Turn(given, self._config.tokens, self._config.temperature, is_answer=True)
                yield Plan(number, seed ^ number, (turn,))


class _WholeVocabulary:
    """A student as a Decoder over all of the target's ids."""

    is_exact = False

    def __init__(self, student: TorchDecoder, ids: Tensor) -> None:
        self._student, self._ids = student, ids
        self.config, self.dtype = student.config, student.dtype

    def compile(self, kv_dtype: torch.dtype) -> None:
        self._student.compile(kv_dtype)

    def stream(self, batch: RowBatch, cache: KVCache) -> Iterator[Tensor]:
        return self._student.stream(batch, cache)

    def hidden(self, batch: RowBatch, cache: KVCache) -> Tensor:
        return self._student.hidden(batch, cache)

    def normed(self, x: Tensor) -> Tensor:
        return self._student.normed(x)

    def logits(self, hidden: Tensor) -> Tensor:
        whole = torch.full((len(hidden), self.config.vocab_size), -torch.inf)
        whole[:, self._ids] = self._student.logits(hidden)
        return whole


def _laid_out(documents: list[Document]) -> Batch:
    """Documents as the rows of a batch; nothing is kept of the target."""
    shape = (len(documents), max(len(document.tokens) for document in documents))
    tokens = torch.zeros(shape, dtype=torch.int64)
    real, answers = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for row, document in enumerate(documents):
        size = len(document.tokens)
        tokens[row, :size] = torch.from_numpy(document.tokens)
        answers[row, :size] = torch.from_numpy(document.answers)
        real[row, :size] = True
    return Batch(tokens, real, answers, {})
