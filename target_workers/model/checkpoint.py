"""The tensors of a safetensors folder, one file or sharded; every one must be there and be used."""

from pathlib import Path

import safetensors
import torch
from torch import Tensor

from target_workers.model.config import ModelError
from target_workers.model.files import Entry, read_entries

SCALE = "_scale"  # after the name of an int8 weight: what multiplies each of its rows


class Checkpoint:
    """Hands out each tensor once; `finish` says which were never asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._entries = dict(read_entries(folder))
        self._files: dict[Path, safetensors.safe_open] = {}
        self._taken: set[str] = set()

    def take(
        self, name: str, *shape: int, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """The tensor `name`, or these rows and columns of it, in the checkpoint's working type.

        The file is mapped: no more of it is read than is handed out. Raises ModelError.
        """
        index = tuple(_slice(part) for part in (rows, columns))
        tensor = self._read(name, shape, index[: len(shape)])
        if tensor.dtype is torch.int8 and name + SCALE in self._entries:
            scale = self._read(name + SCALE, (shape[0], 1), index[:1])
            tensor = tensor.float() * scale.float()
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name} is {tensor.dtype}; of quantised weights only int8 with a "
                f"{name + SCALE} for each row are supported"
            )
        return tensor.to(self._dtype).contiguous()

    def _read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        entry = self.expect(name, *shape)
        whole = self._open(entry.path).get_slice(name)
        tensor = whole[index]
        assert isinstance(tensor, Tensor)
        return tensor

    def expect(self, name: str, *shape: int) -> Entry:
        """Where a tensor of this shape lies; it need not be taken any more. Raises ModelError."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"tensor {name} is missing from the checkpoint; fetch the model again")
        if entry.shape != shape:
            raise ModelError(
                f"tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}; "
                "weights and config.json belong to different models"
            )
        self._taken.add(name)
        return entry

    def finish(self, *, ignored: frozenset[str] = frozenset()) -> None:
        """Raise ModelError for a tensor that the model has no place for."""
        extra = sorted(
            name
            for name in self._entries.keys() - self._taken - ignored
            if not name.endswith("rotary_emb.inv_freq")
        )
        if extra:
            raise ModelError(
                f"tensor {extra[0]} (one of {len(extra)}) has no place in the model; "
                "weights and config.json belong to different models"
            )

    def _open(self, path: Path) -> safetensors.safe_open:
        if path not in self._files:
            self._files[path] = safetensors.safe_open(path, framework="pt")
        return self._files[path]


def _slice(part: range | None) -> slice:
    return slice(None) if part is None else slice(part.start, part.stop)
