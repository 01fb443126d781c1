"""The training loop with a task small enough to be computed by hand."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drafter_workers.training import loop as loop_module
from drafter_workers.training.batches import Batch
from drafter_workers.training.checkpoints import FILE, kept_step
from drafter_workers.training.errors import TrainingError
from drafter_workers.training.loop import Alone, Host, LoopConfig, Record, Workers, train

WIDTH = 3


class Points:
    """Step n's batch is of step n's numbers; how many were asked for is counted."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def steps(self, start: int, stride: int = 1) -> Iterator[Batch]:
        for step in count(start, stride):
            self.read.append(step)
            tokens = torch.randint(9, (4, WIDTH), generator=torch.Generator().manual_seed(step))
            real = torch.ones_like(tokens, dtype=torch.bool)
            yield Batch(tokens, real, real, {})

    def held_out(self, tokens: int) -> Iterator[Batch]:
        return islice(Points().steps(10_000), tokens)


class Line:
    """Learns the sum of its numbers; the loss is multiplied by `scales` at the steps it names."""

    def __init__(self, scales: Mapping[int, float] | None = None) -> None:
        torch.manual_seed(1)
        self.module: nn.Module = nn.Linear(WIDTH, 1)
        self.scales = scales or {}

    def losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        values = batch.tokens.float()
        off = self.module(values).float().squeeze(-1) - values.sum(-1)
        return {"loss": off.square().mean() * self.scales.get(step, 1.0)}

    def quality(self, batches: Iterable[Batch]) -> dict[str, float]:
        return {"agreement": float(sum(1 for _ in batches))}


def config(steps: int, **others: float) -> LoopConfig:
    fields = {"warm_up": 2, "log_every": 3, "look_every": 4, "keep_every": 5, "held_out_tokens": 2}
    return LoopConfig(steps, **(fields | others))  # type: ignore[arg-type]


def run(
    task: Line, folder: Path, loop: LoopConfig, workers: Workers | None = None
) -> tuple[Points, list[Record]]:
    records: list[Record] = []
    source = Points()
    train(task, source, loop, Host(folder, records.append, workers or Alone()))
    return source, records


def weights(task: Line) -> list[Tensor]:
    return [each.detach().clone() for each in task.module.parameters()]


def test_the_rate_warms_up_and_falls_along_a_cosine() -> None:
    loop = LoopConfig(110, rate=0.5, warm_up=10, last_rate=0.1)
    assert [loop.rate_at(step) for step in (0, 4, 9)] == pytest.approx([0.05, 0.25, 0.5])
    assert loop.rate_at(60) == pytest.approx(0.5 * 0.55)
    assert loop.rate_at(110) == pytest.approx(0.05) == pytest.approx(loop.rate_at(500))
    assert LoopConfig(5, rate=1.0, warm_up=0).rate_at(0) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"keep_every": 0},
        {"warm_up": -1},
        {"last_rate": 2.0},
        {"held_out_tokens": 0},
    ],
)
def test_what_is_no_course_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LoopConfig(**({"steps": 3} | wrong))  # type: ignore[arg-type]


def test_it_tells_keeps_and_looks_when_it_is_told_to(tmp_path: Path) -> None:
    source, records = run(Line(), tmp_path, config(10))
    assert [r.step for r in records if "loss" in r.values] == [3, 6, 9, 10]
    assert [r.step for r in records if "agreement" in r.values] == [0, 4, 8, 10]
    assert source.read == list(range(10)), "no batch too many is made"
    assert kept_step(tmp_path) == 10
    assert records[-1].left_s == 0
    again, nothing = run(Line(), tmp_path, config(10))
    assert nothing == [] and again.read == []


def test_logged_losses_are_means_since_the_last(tmp_path: Path) -> None:
    each = run(Line(), tmp_path / "each", config(6, log_every=1))[1]
    some = run(Line(), tmp_path / "some", config(6, log_every=3))[1]
    single = [r.values["loss"] for r in each if "loss" in r.values]
    means = [r.values["loss"] for r in some if "loss" in r.values]
    assert means == pytest.approx([sum(single[:3]) / 3, sum(single[3:]) / 3])


def test_going_on_is_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, parts = Line(), Line()
    run(whole, tmp_path / "whole", config(13))

    class Gone(Exception): ...

    def until(record: Record) -> None:
        if record.step == 8:
            raise Gone

    with pytest.raises(Gone):
        train(parts, Points(), config(13), Host(tmp_path / "parts", until))
    other = Line()
    source, _ = run(other, tmp_path / "parts", config(13))
    assert source.read == list(range(5, 13))
    assert all(map(torch.equal, weights(whole), weights(other)))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e38])
def test_no_checkpoint_holds_what_is_not_finite(tmp_path: Path, scale: float) -> None:
    """The step before one is kept is spoilt: the weights then are, and no later loss shows it."""
    with pytest.raises(TrainingError, match="not finite at step 10"):
        run(Line({9: scale}), tmp_path, config(20, log_every=1000))
    kept = torch.load(tmp_path / FILE, weights_only=True)
    assert kept["step"] == 5
    assert all(bool(each.isfinite().all()) for each in kept["trained"].values())
    task = Line()
    run(task, tmp_path, config(20))
    assert all(bool(each.isfinite().all()) for each in weights(task))


def test_a_gradient_that_is_not_finite_is_seen_beside_a_finite_loss(tmp_path: Path) -> None:
    class Steep(Line):
        def losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
            parts = super().losses(batch, step)
            zero = self.module.weight.sum() * 0  # type: ignore[union-attr,operator]
            return {"loss": parts["loss"] + (zero.sqrt() if step == 9 else 0)}

    with pytest.raises(TrainingError, match="gradient is not finite at step 10"):
        run(Steep(), tmp_path, config(20, log_every=1000))
    assert kept_step(tmp_path) == 5


def test_gradients_are_clipped_at_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[float] = []
    plain = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, closure: None = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        sizes.append(float(torch.stack([g.norm() for g in grads]).norm()))
        plain(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    _, records = run(Line(), tmp_path, config(2, log_every=1))
    assert max(sizes) < 1.0001
    told = [record.values["gradient"] for record in records if "gradient" in record.values]
    assert min(told) > 1, "what is told is the size before"


def test_every_step_is_taken_at_its_own_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    plain = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, closure: None = None) -> None:
        rates.extend(group["lr"] for group in self.param_groups)
        plain(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    loop = config(8, rate=0.1)
    run(Line(), tmp_path, loop)
    assert rates == [loop.rate_at(step) for step in range(8)]
    rates.clear()
    lower = config(12, rate=0.01)
    run(Line(), tmp_path, lower)
    assert rates == [lower.rate_at(step) for step in range(8, 12)]


@pytest.mark.parametrize("has", [True, False])
def test_precision_is_mixed_where_the_device_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    seen: list[bool] = []

    class Spy(Line):
        def losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().losses(batch, step)

    monkeypatch.setattr(loop_module, "has_pair_dot", lambda: has)
    run(Spy(), tmp_path, config(2))
    assert seen == [has, has]


class Threads:
    """Workers that are threads of this process."""

    def __init__(self, rank: int, slots: list[list[Tensor]], meet: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._meet = slots, meet

    def average(self, gradients: Sequence[Tensor]) -> None:
        self._slots[self.rank] = [each.clone() for each in gradients]
        self._meet.wait(30)
        for gradient, *same in zip(gradients, *self._slots, strict=True):
            gradient.copy_(torch.stack(same).mean(0))
        self._meet.wait(30)


class Pairs(Line):
    """One worker that learns from two batches a step."""

    def __init__(self) -> None:
        super().__init__()
        self._source = Points()

    def losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        both = islice(self._source.steps(2 * step), 2)
        losses = [super(Pairs, self).losses(each, step)["loss"] for each in both]
        return {"loss": (losses[0] + losses[1]) / 2}


def test_two_workers_take_the_step_of_one_with_both_batches(tmp_path: Path) -> None:
    slots: list[list[Tensor]] = [[], []]
    meet = threading.Barrier(2)
    tasks = [Line(), Line()]
    results: dict[int, tuple[Points, list[Record]]] = {}

    def work(rank: int) -> None:
        workers = Threads(rank, slots, meet)
        results[rank] = run(tasks[rank], tmp_path / "two", config(7), workers)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    single = Pairs()
    run(single, tmp_path / "one", config(7))
    for one, *both in zip(*map(weights, (single, *tasks)), strict=True):
        assert torch.equal(both[0], both[1])
        torch.testing.assert_close(one, both[0])
    assert [results[rank][0].read for rank in range(2)] == [
        list(range(0, 14, 2)),
        list(range(1, 14, 2)),
    ]
    assert not any("agreement" in record.values for record in results[1][1])
    assert json.dumps(results[0][1][0].values), "what is told can be written down"
