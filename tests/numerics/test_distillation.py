"""The distillation loss against its definition in NumPy, and what must hold of it."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter_workers.methods.student import DistillConfig, combined, feature_loss, soft_loss
from drafter_workers.training.errors import TrainingError
from drafter_workers.training.teachers import Taught

Array = NDArray[np.float64]
ROWS, IDS, HIDDEN = 7, 50, 16


def pair(spread: float = 2.0, apart: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits of a student and of a teacher."""
    generator = torch.Generator().manual_seed(3)
    teacher = spread * torch.randn(ROWS, IDS, generator=generator)
    return teacher + apart * torch.randn(ROWS, IDS, generator=generator), teacher


def softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def divergence(student: Tensor, teacher: Tensor, t: float) -> float:
    """t^2 times the mean over rows of sum p log(p / q)."""
    p, q = (softmax(each.double().numpy() / t) for each in (teacher, student))
    return float(t * t * (p * np.log(p / q)).sum(-1).mean())


@pytest.mark.parametrize("t", [0.5, 1.0, 2.0, 4.0])
def test_soft_labels_are_the_divergence_they_are_said_to_be(t: float) -> None:
    student, teacher = pair()
    got = float(soft_loss(student, teacher, DistillConfig(temperature=t)))
    assert got == pytest.approx(divergence(student, teacher, t), abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("t", [1.0, 3.0])
def test_its_gradient_is_the_difference_of_the_distributions(t: float) -> None:
    student, teacher = pair()
    student.requires_grad_()
    soft_loss(student, teacher, DistillConfig(temperature=t)).backward()
    p, q = (softmax(each.detach().double().numpy() / t) for each in (teacher, student))
    assert student.grad is not None
    np.testing.assert_allclose(student.grad.numpy(), t * (q - p) / ROWS, atol=1e-6)


@pytest.mark.parametrize("kind", ["kl", "mse"])
@pytest.mark.parametrize("t", [1.0, 2.0])
def test_equal_models_have_no_loss_and_no_gradient(kind: str, t: float) -> None:
    _, teacher = pair()
    student = teacher.clone().requires_grad_()
    loss = soft_loss(student, teacher, DistillConfig(temperature=t, kind=kind))
    loss.backward()
    assert student.grad is not None
    assert abs(float(loss.detach())) < 1e-6 and float(student.grad.abs().max()) < 1e-6


def test_the_size_of_gradients_does_not_depend_on_the_temperature() -> None:
    sizes = []
    for t in (1.0, 2.0, 4.0):
        student, teacher = pair(spread=0.3, apart=0.1)
        student.requires_grad_()
        soft_loss(student, teacher, DistillConfig(temperature=t)).backward()
        assert student.grad is not None
        sizes.append(float(student.grad.norm()))
    assert max(sizes) < 1.1 * min(sizes)


def test_all_parts_together() -> None:
    student, teacher = pair()
    generator = torch.Generator().manual_seed(5)
    hidden, states = torch.randn(2, ROWS, HIDDEN, generator=generator).unbind(0)
    labels = torch.randint(IDS, (ROWS,), generator=generator)
    config = DistillConfig(temperature=2.0, hard=0.3, features=0.7)
    got = combined(student, hidden, labels, Taught(teacher, states), config)

    own = np.log(softmax(student.double().numpy()))
    hard = -own[np.arange(ROWS), labels.numpy()].mean()
    apart = (hidden - states).double().numpy()
    matched = (apart**2).mean() / (states.double().numpy() ** 2).mean()
    expected = 0.7 * divergence(student, teacher, 2.0) + 0.3 * hard + 0.7 * matched
    assert float(got["loss"]) == pytest.approx(expected, abs=1e-6, rel=1e-6)
    assert float(feature_loss(states, states)) == 0.0


def test_squares_of_logits_instead() -> None:
    student, teacher = pair()
    got = float(soft_loss(student, teacher, DistillConfig(kind="mse")))
    expected = ((student - teacher).double().numpy() ** 2).mean()
    assert got == pytest.approx(float(expected), rel=1e-6)


def test_features_need_states() -> None:
    student, teacher = pair()
    config = DistillConfig(features=1.0)
    with pytest.raises(TrainingError, match="--keep states"):
        combined(student, student, torch.zeros(ROWS).long(), Taught(teacher), config)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 0.0}, {"hard": 1.1}, {"features": -1.0}, {"kind": "cosine"}],
)
def test_what_is_no_loss_is_refused(wrong: dict[str, float | str]) -> None:
    with pytest.raises(ValueError, match=r"distillation needs|the loss must be"):
        DistillConfig(**wrong)  # type: ignore[arg-type]
