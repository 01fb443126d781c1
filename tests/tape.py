"""A CUDA graph on the CPU: the operators of a computation, done again on the same memory.

Like a graph it runs no Python again and knows no shape or number but those it was recorded with.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from target_workers.model.cuda_graphs import Recorded


class _Tape(TorchDispatchMode):
    """Keeps what changes memory: operators whose results are new, or that write to what is old."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, got = _tensors((args, kwargs)), _tensors(out)
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = [tensor.untyped_storage().data_ptr() not in known for tensor in got]
        if func._schema.is_mutable or any(new):
            self._steps.append(lambda: _again(func, args, kwargs, got, new))
        return out

    def replay(self) -> None:
        for step in self._steps:
            step()


def _again(
    func: Any, args: Any, kwargs: dict[str, Any], into: list[Tensor], new: list[bool]
) -> None:
    for old, fresh, is_new in zip(into, _tensors(func(*args, **kwargs)), new, strict=True):
        if is_new:
            old.copy_(fresh)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def record(compute: Callable[[], Tensor]) -> Recorded:
    """The Record of a machine without a GPU."""
    tape = _Tape()
    with tape:
        output = compute()
    return Recorded(output, tape.replay)
