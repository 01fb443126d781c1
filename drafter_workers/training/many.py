"""The same training on several devices: Ray Train starts the processes, gradients are averaged."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchTrainer
from torch import Tensor

from drafter_workers.training.errors import TrainingError
from drafter_workers.training.loop import Workers


class Together:
    """The Workers of a process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def average(self, gradients: Sequence[Tensor]) -> None:
        """One exchange for all of them."""
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.size
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def train_many(work: Callable[[Workers], None], count: int, *, on_gpus: bool) -> None:
    """Run `work` in so many processes of this machine, each with its place in the group.

    Raises TrainingError with what the first process that failed said. Not run on GPUs yet.
    """

    def each(_: dict[str, object]) -> None:
        work(Together())

    with _ray(count), TemporaryDirectory() as scratch:
        trainer = TorchTrainer(
            each,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=count, use_gpu=on_gpus),
            run_config=RunConfig(storage_path=scratch),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise TrainingError(_said(error)) from error
        except SystemExit as stopped:  # what Ray makes of an interrupt
            raise KeyboardInterrupt from stopped


@contextmanager
def _ray(count: int) -> Iterator[None]:
    """Ray with room for so many: the one that runs, or one of this machine's own for so long."""
    if ray.is_initialized():
        yield
        return
    cores = max(count, os.cpu_count() or 1)
    try:
        ray.init(
            "local",
            num_cpus=cores,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield
    finally:
        ray.shutdown()


def _said(error: TrainingFailedError) -> str:
    """What a person can do something about: the first worker's own words, in one line."""
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    for rank, failure in sorted(failures.items()):
        return f"worker {rank}: {' '.join(str(failure).split())}"
    return " ".join(str(error).split())
