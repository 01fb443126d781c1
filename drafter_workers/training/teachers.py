"""What a target says at every row of a batch: from what a corpus kept of it, or asked anew."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from drafter_workers.training.attention import causal
from drafter_workers.training.batches import Batch
from drafter_workers.training.corpus import Origin
from target_workers.model.decoder import TorchDecoder
from target_workers.model.loading import load_reference, read_head

LEAST = 1e-6  # of the whole chance, for all that was not kept: half-precision logits say no less


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """Logits [n, ids] over the student's ids and, if known, normed hidden states [n, hidden]."""

    logits: Tensor
    states: Tensor | None = None


class Teacher(Protocol):
    """What to learn, of the rows `picked` bool [rows * t] of a batch."""

    def teach(self, batch: Batch, picked: Tensor) -> Taught:
        """What the student should say."""
        ...

    def best(self, batch: Batch, picked: Tensor) -> Tensor:
        """The target's best tokens [n], of its whole vocabulary."""
        ...


class Head:
    """The target's head over its vocabulary [vocab, hidden], and the ids that a student knows."""

    def __init__(self, weight: Tensor, ids: Tensor) -> None:
        self._whole = weight.bfloat16()
        self._known = self._whole[ids]

    def logits(self, states: Tensor) -> Tensor:
        """Over the student's ids: [n, ids]."""
        return states.bfloat16() @ self._known.T

    def best(self, states: Tensor) -> Tensor:
        """The best token of each row [n], a piece at a time."""
        pieces = (rows.bfloat16() @ self._whole.T for rows in states.split(512))
        return torch.cat([logits.argmax(-1) for logits in pieces])


class KeptStates:
    """Logits from the target's hidden states that a corpus kept, through its head."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def teach(self, batch: Batch, picked: Tensor) -> Taught:
        states = batch.parts["states"].flatten(0, 1)[picked]
        return Taught(self._head.logits(states), states)

    def best(self, batch: Batch, picked: Tensor) -> Tensor:
        return self._head.best(batch.parts["states"].flatten(0, 1)[picked])


class KeptTop:
    """The target's best tokens that a corpus kept; all others share evenly what is left."""

    def __init__(self, vocab_size: int, ids: Tensor) -> None:
        self._vocab = vocab_size
        self._ids = ids

    def teach(self, batch: Batch, picked: Tensor) -> Taught:
        parts = {name: part.flatten(0, 1)[picked] for name, part in batch.parts.items()}
        top, sums = parts["top_logits"].float(), parts["log_sums"].float()
        left = 1 - (top - sums[:, None]).exp().sum(-1)
        others = max(1, self._vocab - top.shape[-1])
        each = sums + (left.clamp(min=LEAST) / others).log()
        logits = each[:, None].repeat(1, self._vocab)
        logits.scatter_(1, parts["top_ids"].long(), top)
        return Taught(logits[:, self._ids])

    def best(self, batch: Batch, picked: Tensor) -> Tensor:
        best: Tensor = batch.parts["top_ids"].flatten(0, 1)[picked][:, 0].long()
        return best


class Asked:
    """The target itself, run over every batch."""

    def __init__(self, decoder: TorchDecoder, ids: Sequence[int]) -> None:
        self.decoder = decoder
        self._head = Head(decoder.head.weight.detach(), torch.tensor(ids))

    def teach(self, batch: Batch, picked: Tensor) -> Taught:
        states = self.states(batch)[picked]
        return Taught(self._head.logits(states), states)

    def best(self, batch: Batch, picked: Tensor) -> Tensor:
        return self._head.best(self.states(batch)[picked])

    @torch.no_grad()
    def states(self, batch: Batch) -> Tensor:
        """Normed hidden states [rows * t, hidden]."""
        return run_rows(self.decoder, batch.tokens)


class KeptOrAsked:
    """What a corpus kept, where a batch is of the corpus; else the target is asked."""

    def __init__(self, kept: Teacher | None, asked: Teacher) -> None:
        self._kept, self._asked = kept, asked

    def teach(self, batch: Batch, picked: Tensor) -> Taught:
        return self._of(batch).teach(batch, picked)

    def best(self, batch: Batch, picked: Tensor) -> Tensor:
        return self._of(batch).best(batch, picked)

    def _of(self, batch: Batch) -> Teacher:
        return self._kept if self._kept is not None and batch.parts else self._asked


class Ensemble:
    """The mean of what several teachers hold likely."""

    def __init__(self, teachers: Sequence[Teacher]) -> None:
        self._teachers = teachers

    def teach(self, batch: Batch, picked: Tensor) -> Taught:
        each = [teacher.teach(batch, picked).logits for teacher in self._teachers]
        likely = torch.stack([logits.float().log_softmax(-1) for logits in each])
        return Taught(likely.logsumexp(0) - math.log(len(each)))

    def best(self, batch: Batch, picked: Tensor) -> Tensor:
        """Those of the first, which is the target that is served."""
        return self._teachers[0].best(batch, picked)


def run_rows(decoder: TorchDecoder, tokens: Tensor) -> Tensor:
    """Normed hidden states [rows * t, hidden] of rows of tokens [rows, t] from position 0 on."""
    rows, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(rows)
    return decoder.run(tokens.flatten(), positions, causal(decoder, rows))


def kept_teacher(folder: Path, origin: Origin, ids: Sequence[int]) -> Teacher | None:
    """What a corpus kept of the target as a teacher; None if it kept nothing. Raises ModelError."""
    known = torch.tensor(ids)
    if origin.kept.state_size:
        return KeptStates(Head(read_head(folder), known))
    return KeptTop(origin.vocab_size, known) if origin.kept.top else None


def ask(folder: Path, ids: Sequence[int]) -> Asked:
    """A model that is asked anew for every batch. Raises ModelError."""
    return Asked(load_reference(folder, dtype=torch.bfloat16), ids)
