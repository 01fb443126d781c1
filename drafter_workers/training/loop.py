"""The one training loop: what is trained gives a loss for a batch, all else is here.

A run is a function of its task, its batches and its seed: killed at any time, it goes on from its
last checkpoint as if nothing had happened.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from drafter_workers.training.batches import Batch
from drafter_workers.training.checkpoints import restore, store
from drafter_workers.training.errors import TrainingError
from target_workers.model.native.llvm import has_pair_dot

MAX_NORM = 1.0
BETAS = (0.9, 0.95)


class Task(Protocol):
    """What is trained: a module, its loss for a batch, and how good it is."""

    @property
    def module(self) -> nn.Module: ...

    def losses(self, batch: Batch, step: int) -> Mapping[str, Tensor]:
        """Scalars by name; "loss" is what goes down."""
        ...

    def quality(self, batches: Iterable[Batch]) -> Mapping[str, float]:
        """How well it drafts what the target said, by name."""
        ...


class Source(Protocol):
    """Where batches come from, by step, and those held out."""

    def steps(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Every `stride`th batch from `start` on, without end: the same ones whoever asks."""
        ...

    def held_out(self, tokens: int) -> Iterator[Batch]: ...


class Workers(Protocol):
    """The processes that train one model together; `rank` of `size`."""

    rank: int
    size: int

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Make every process's gradients the mean of all, in place."""
        ...


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Steps, the learning rate's course, and how often to log, look and keep (in steps)."""

    steps: int
    rate: float = 2e-3
    warm_up: int = 150
    last_rate: float = 0.05
    weight_decay: float = 0.01
    log_every: int = 10
    look_every: int = 200
    keep_every: int = 100
    held_out_tokens: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.log_every, self.look_every, self.keep_every) < 1:
            raise ValueError("steps and the intervals of log, look and keep must be at least 1")
        if self.warm_up < 0 or self.held_out_tokens < 1 or not 0 <= self.last_rate <= 1:
            raise ValueError(
                "the warm-up must not be negative, the last rate a share of the highest, and some "
                "tokens must be held out"
            )
        if not 0 < self.rate < math.inf:
            raise ValueError(f"the learning rate must be positive and finite, is {self.rate}")

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a half cosine to `last_rate` of the rate."""
        warm = min(1.0, (step + 1) / max(1, self.warm_up))
        done = max(0, step - self.warm_up) / max(1, self.steps - self.warm_up)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return self.rate * warm * (self.last_rate + (1 - self.last_rate) * cosine)


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a run's log: mean losses and size of gradients since the last, or the quality."""

    step: int
    values: Mapping[str, float]
    left_s: float


Told = Callable[[Record], object]


class Alone:
    """The Workers of a run in one process."""

    rank = 0
    size = 1

    def average(self, gradients: Sequence[Tensor]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Host:
    """Where a run is kept, who hears of it, and who trains with it."""

    folder: Path
    told: Told
    workers: Workers = field(default_factory=Alone)


def train(task: Task, source: Source, config: LoopConfig, host: Host) -> None:
    """Train, from the last checkpoint in the host's folder if there is one. Raises TrainingError.

    Every process is told; only the first one looks at what is held out, and keeps.
    """
    torch.manual_seed(config.seed)
    workers = host.workers
    run = _Run(task, config, workers, host.told)
    run.step = restore(host.folder, task.module, run.optimiser)
    is_first = workers.rank == 0
    if run.step == 0 and is_first:
        run.look(source)
    batches = source.steps(run.step * workers.size + workers.rank, workers.size)
    for batch in islice(batches, max(0, config.steps - run.step)):
        run.take(batch)
        is_last = run.step == config.steps
        if run.step % config.log_every == 0 or is_last:
            run.log()
        if is_first and (run.step % config.look_every == 0 or is_last):
            run.look(source)
        if is_first and (run.step % config.keep_every == 0 or is_last):
            run.check()
            store(host.folder, task.module, run.optimiser, run.step)


class _Run:
    """A run between two batches: the optimiser, the step, the losses since the last log."""

    def __init__(self, task: Task, config: LoopConfig, workers: Workers, told: Told) -> None:
        self._task, self._config, self._workers, self._told = task, config, workers, told
        self._trained = [each for each in task.module.parameters() if each.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self._trained,
            lr=config.rate,
            betas=BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.step = 0
        self._sums: dict[str, Tensor] = {}
        self._since = 0
        self._started = time.perf_counter()
        self._taken = 0

    def take(self, batch: Batch) -> None:
        """One step. Losses stay where they were computed: reading them would wait for a device."""
        for group in self.optimiser.param_groups:
            group["lr"] = self._config.rate_at(self.step)
        self.optimiser.zero_grad()
        with self._mixed():
            losses = self._task.losses(batch, self.step)
        losses["loss"].backward()
        gradients = [each.grad for each in self._trained if each.grad is not None]
        self._workers.average(gradients)
        norm = nn.utils.clip_grad_norm_(self._trained, MAX_NORM)
        self.optimiser.step()
        self.step += 1
        self._taken += 1
        self._since += 1
        # A gradient can spoil weights that a finite loss was of, in every process at once.
        for name, value in {**losses, "gradient": norm}.items():
            held = self._sums.get(name)
            self._sums[name] = value.detach() if held is None else held + value.detach()

    def log(self) -> None:
        """Tell the mean losses since the last log."""
        self.check()
        means = {name: float(total) / self._since for name, total in self._sums.items()}
        self._tell(means | {"rate": self._config.rate_at(self.step - 1)})
        self._sums.clear()
        self._since = 0

    def look(self, source: Source) -> None:
        """Tell how good it is on what is held out."""
        with self._mixed():
            found = self._task.quality(source.held_out(self._config.held_out_tokens))
        self._tell(found)

    def check(self) -> None:
        """Raise TrainingError if losses or gradients since the last log are not all finite."""
        for name, total in self._sums.items():
            if not bool(total.isfinite()):
                raise TrainingError(
                    f"{name} is not finite at step {self.step}; the last checkpoint is whole: run "
                    "the same command with a lower --rate to go on from it"
                )

    def _mixed(self) -> AbstractContextManager[None]:
        """bfloat16 for what gains by it, where the device multiplies it."""
        device = next(iter(self._task.module.parameters())).device.type
        has = has_pair_dot() if device == "cpu" else True
        return torch.autocast(device, torch.bfloat16, enabled=has)

    def _tell(self, values: Mapping[str, float]) -> None:
        each_s = (time.perf_counter() - self._started) / max(1, self._taken)
        left = self._config.steps - self.step
        self._told(Record(self.step, values, left * each_s if self._taken else math.nan))
