"""The same training on several devices: Ray Train starts the processes, gradients are averaged."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor

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
    """Run `work` in so many processes, each with its place in the group. Not run on GPUs yet.

    Raises ray.train's TrainingFailedError, with the worker's error as its cause.
    """

    def each(_: dict[str, object]) -> None:
        work(Together())

    TorchTrainer(
        each,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=count, use_gpu=on_gpus),
    ).fit()
