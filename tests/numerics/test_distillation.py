"""The distillation loss against its definition in NumPy, and what must hold of it."""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Scene:
    """What a student said of some rows, and what it was to say."""

    student: Tensor
    hidden: Tensor
    labels: Tensor
    taught: Taught


def scene() -> Scene:
    student, teacher = pair()
    generator = torch.Generator().manual_seed(5)
    hidden, states = torch.randn(2, ROWS, HIDDEN, generator=generator).unbind(0)
    labels = torch.randint(IDS, (ROWS,), generator=generator)
    return Scene(student, hidden, labels, Taught(teacher, states))


def defined(scene: Scene, student: Array, hidden: Array, config: DistillConfig) -> float:
    """The whole loss by its definition, of logits and hidden states of a student."""
    teacher = scene.taught.logits.double().numpy()
    if config.kind == "mse":
        soft = ((student - teacher) ** 2).mean()
    else:
        t = config.temperature
        p, q = softmax(teacher / t), softmax(student / t)
        soft = t * t * (p * np.log(p / q)).sum(-1).mean()
    hard = -np.log(softmax(student))[np.arange(ROWS), scene.labels.numpy()].mean()
    assert scene.taught.states is not None
    states = scene.taught.states.double().numpy()
    matched = ((hidden - states) ** 2).mean() / (states**2).mean()
    return float((1 - config.hard) * soft + config.hard * hard + config.features * matched)


def slopes(of: Callable[[Array], float], at: Array) -> Array:
    """Central differences of a function, place by place."""
    out, step = np.zeros_like(at), 1e-5
    for place in np.ndindex(at.shape):
        apart = np.zeros_like(at)
        apart[place] = step
        out[place] = (of(at + apart) - of(at - apart)) / (2 * step)
    return out


CONFIGS = [
    DistillConfig(temperature=2.0, hard=0.3, features=0.7),
    DistillConfig(temperature=4.0, features=2.0),
    DistillConfig(kind="mse", hard=0.25, features=0.5),
    DistillConfig(hard=1.0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_all_parts_together_and_their_slopes(config: DistillConfig) -> None:
    at = scene()
    student, hidden = (each.double().numpy() for each in (at.student, at.hidden))
    logits, states = (each.clone().requires_grad_() for each in (at.student, at.hidden))
    got = combined(logits, states, at.labels, at.taught, config)["loss"]
    got.backward()
    assert float(got.detach()) == pytest.approx(defined(at, student, hidden, config), abs=1e-6)
    by_logits = slopes(lambda each: defined(at, each, hidden, config), student)
    by_states = slopes(lambda each: defined(at, student, each, config), hidden)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), by_logits, atol=1e-6)
    grad = torch.zeros_like(states) if states.grad is None else states.grad
    np.testing.assert_allclose(grad.numpy(), by_states, atol=1e-6)


def test_equal_models_have_no_loss_in_any_part_but_the_labels() -> None:
    at = scene()
    states = at.taught.states
    assert states is not None
    got = combined(at.taught.logits, states, at.labels, at.taught, DistillConfig(features=1.0))
    assert abs(float(got["loss"])) < 1e-6 and float(feature_loss(states, states)) == 0.0


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


@pytest.mark.parametrize("kind", ["kl", "mse"])
def test_a_batch_without_a_token_the_student_knows_teaches_nothing(kind: str) -> None:
    at = scene()
    assert at.taught.states is not None
    student, hidden = (each[:0].clone().requires_grad_() for each in (at.student, at.hidden))
    taught = Taught(at.taught.logits[:0], at.taught.states[:0])
    config = DistillConfig(kind=kind, hard=0.5, features=1.0)
    parts = combined(student, hidden, at.labels[:0], taught, config)
    assert {name: float(each.detach()) for name, each in parts.items()} == dict.fromkeys(parts, 0.0)
    parts["loss"].backward()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"features": float("inf")},
        {"hard": 1.1},
        {"features": -1.0},
        {"kind": "cosine"},
    ],
)
def test_what_is_no_loss_is_refused(wrong: dict[str, float | str]) -> None:
    with pytest.raises(ValueError, match=r"distillation needs|the loss must be"):
        DistillConfig(**wrong)  # type: ignore[arg-type]
