"""A student of its target: fewer of the same layers, made to agree with what the target would say.

Serving it is `small_model`'s work; here is what it is made of and its loss (Hinton et al. 2015:
soft labels at a temperature t, with the factor t^2 that keeps gradients of one size).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_workers.training.acceptance import BoolArray, accepted_length, by_depth
from drafter_workers.training.batches import Batch
from drafter_workers.training.errors import TrainingError
from drafter_workers.training.teachers import Taught, Teacher, run_rows
from target_workers.model.decoder import TorchDecoder

DEPTH = 4  # of the chains that held-out acceptance is measured with


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """The loss: soft labels at `temperature`, by divergence or as logits' squared difference.

    `hard` is the share of the corpus's own tokens as labels, `features` the weight of matching the
    target's last hidden states.
    """

    temperature: float = 1.0
    hard: float = 0.0
    features: float = 0.0
    kind: str = "kl"

    def __post_init__(self) -> None:
        known = 0 < self.temperature < math.inf and 0 <= self.features < math.inf
        if not known or not 0 <= self.hard <= 1:
            raise ValueError(
                "distillation needs a temperature above 0, a share of hard labels from 0 to 1 and "
                f"a weight of features that is not negative, is {self}"
            )
        if self.kind not in ("kl", "mse"):
            raise ValueError(f"the loss must be kl or mse, is {self.kind!r}")


def soft_loss(student: Tensor, teacher: Tensor, config: DistillConfig) -> Tensor:
    """The mean over rows of [n, ids] logits: t^2 KL(teacher_t || student_t), or squares.

    Zero for equal logits; for "kl", also where they differ by a constant per row; zero for no rows.
    """
    student, teacher = student.float(), teacher.float()
    rows = max(1, len(student))
    if config.kind == "mse":
        return F.mse_loss(student, teacher, reduction="sum") / (rows * student.shape[-1])
    t = config.temperature
    divergence = F.kl_div(
        (student / t).log_softmax(-1),
        (teacher / t).log_softmax(-1),
        reduction="sum",
        log_target=True,
    )
    return t * t * divergence / rows


def feature_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared distance of hidden states [n, hidden], relative to the teacher's size.

    Zero for no rows.
    """
    student, teacher = student.float(), teacher.float()
    size = teacher.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
    return F.mse_loss(student, teacher, reduction="sum") / size


class StudentTask:
    """A student and its teacher, for the training loop. `ids` are the tokens it can propose."""

    def __init__(
        self, student: TorchDecoder, ids: Sequence[int], teacher: Teacher, config: DistillConfig
    ) -> None:
        self.module = student
        for name, each in student.named_parameters():
            # The ends are the target's; a norm of heads is one vector for all of them.
            each.requires_grad_(name.startswith(("blocks.", "norm.")) and "qk_norm" not in name)
        self._student, self._teacher, self._config = student, teacher, config
        self._ids = torch.tensor(ids)
        self._own = torch.full((student.config.vocab_size,), -1)  # the draft id of a token
        self._own[self._ids] = torch.arange(len(ids))

    def losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """What the student says of every next token it could propose, beside the teacher."""
        labels = self._own[_next(batch.tokens, 0)].flatten()
        picked = _next(batch.real, False).flatten() & (labels >= 0)
        taught = self._teacher.teach(batch, picked)
        hidden = run_rows(self._student, batch.tokens)[picked]
        return combined(self._student.head(hidden), hidden, labels[picked], taught, self._config)

    @torch.no_grad()
    def quality(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Over answers: how often its best guess is the target's best token (`agreement`) and the
        one the target wrote (`acceptance`); tokens per round of chains (`accepted_length`); the
        chance of the first guesses of a chain, each given those before it (`stands_1`, ...).

        Raises TrainingError if there is no answer.
        """
        rows = [row for batch in batches for row in self._guessed(batch)]
        written = [hits for _, hits in rows]
        every = sum(map(len, written))
        if not every:
            raise TrainingError("no held-out document has an answer; capture more documents")
        return {
            "agreement": sum(int(best.sum()) for best, _ in rows) / every,
            "acceptance": sum(int(hits.sum()) for hits in written) / every,
            "accepted_length": every / sum(len(h) / accepted_length(h, DEPTH) for h in written),
            **{f"stands_{d}": c for d, c in enumerate(by_depth(written, DEPTH), 1)},
        }

    def _guessed(self, batch: Batch) -> Iterable[tuple[BoolArray, BoolArray]]:
        """For every row with answers, where a guess is the target's best, and where it stands."""
        asked = _next(batch.answers, False)
        picked = asked.flatten()
        logits = self._student.head(run_rows(self._student, batch.tokens)[picked])
        guesses = self._ids[logits.argmax(-1)]
        best = guesses == self._teacher.best(batch, picked)
        stands = guesses == _next(batch.tokens, 0).flatten()[picked]
        sizes = asked.sum(1).tolist()
        for agrees, hits in zip(best.split(sizes), stands.split(sizes), strict=True):
            if len(hits):
                yield agrees.numpy(), hits.numpy()


def combined(
    logits: Tensor, hidden: Tensor, labels: Tensor, taught: Taught, config: DistillConfig
) -> dict[str, Tensor]:
    """The loss of logits [n, ids] and hidden states [n, hidden], and its parts."""
    parts = {"soft": soft_loss(logits, taught.logits, config)}
    loss = (1 - config.hard) * parts["soft"]
    if config.hard:
        summed = F.cross_entropy(logits.float(), labels, reduction="sum")
        parts["hard"] = summed / max(1, len(labels))
        loss = loss + config.hard * parts["hard"]
    if config.features:
        if taught.states is None:
            raise TrainingError(
                "features cannot be matched without the target's states: capture with --keep "
                "states, and leave out further teachers"
            )
        parts["features"] = feature_loss(hidden, taught.states)
        loss = loss + config.features * parts["features"]
    return {"loss": loss, **parts}


def _next(rows: Tensor, last: int | bool) -> Tensor:
    """[rows, t] moved by one place, so that a token has its successor's value."""
    return torch.cat((rows[:, 1:], torch.full_like(rows[:, :1], last)), 1)
