"""Online distillation: student and teacher learn the corpus together, the student from the teacher
as it is at that step (Zhang et al. 2018, in one direction)."""

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from drafter_workers.methods.student import StudentTask
from drafter_workers.training.batches import Batch
from drafter_workers.training.teachers import Asked, run_rows


class OnlineTask:
    """A StudentTask whose teacher is trained too, on the corpus's own tokens."""

    def __init__(self, student: StudentTask, teacher: Asked) -> None:
        self._student, self._teacher = student, teacher
        for name, each in teacher.decoder.named_parameters():
            each.requires_grad_(name.startswith(("blocks.", "norm.")) and "qk_norm" not in name)
        self.module = nn.ModuleDict({"student": student.module, "teacher": teacher.decoder})

    def losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """The student's, and the teacher's for the tokens that came."""
        parts = self._student.losses(batch, step)
        real = batch.real[:, 1:].flatten()
        hidden = run_rows(self._teacher.decoder, batch.tokens[:, :-1])[real]
        logits = self._teacher.decoder.head(hidden).float()
        parts["teacher"] = F.cross_entropy(logits, batch.tokens[:, 1:].flatten()[real])
        return parts | {"loss": parts["loss"] + parts["teacher"]}

    def quality(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The student's."""
        return self._student.quality(batches)
