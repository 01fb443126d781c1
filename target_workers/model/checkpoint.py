"""The tensors of a safetensors folder, one file or sharded; every one must be there and be used."""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from target_workers.model.config import Json, ModelError, read_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SAMPLE_BYTES = 256
VOLATILE_KEYS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: its file and the bytes [begin, end) of it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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
        entry = self.expect(name, *shape)
        index = tuple(_slice(part) for part in (rows, columns))
        whole = self._open(entry.path).get_slice(name)  # type: ignore[no-untyped-call]
        tensor = whole[index[: len(shape)]]
        assert isinstance(tensor, Tensor)
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name} is {entry.dtype}; quantised weights are not supported")
        return tensor.to(self._dtype).contiguous()

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


def model_hash(folder: Path | str) -> str:
    """Hash of what the model computes, cheap and the same for one file or shards.

    It covers config.json without the keys that only describe the saving, and for every tensor by
    name: type, shape, and the bytes at its start, middle and end. Raises ModelError.
    """
    folder = Path(folder)
    config = {k: v for k, v in read_config(folder).items() if k not in VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, entry in sorted(read_entries(folder).items()):
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        middle = (entry.begin + entry.end) // 2
        with entry.path.open("rb") as file:
            for begin in (entry.begin, middle, max(entry.begin, entry.end - SAMPLE_BYTES)):
                file.seek(begin)
                digest.update(file.read(min(SAMPLE_BYTES, entry.end - begin)))
    return digest.hexdigest()[:32]


def read_entries(folder: Path) -> Mapping[str, Entry]:
    """Every tensor of a folder's safetensors files. Raises ModelError."""
    if (folder / INDEX_FILE).is_file():
        return _read_sharded(folder)
    if not (folder / SINGLE_FILE).is_file():
        raise ModelError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the model again"
        )
    return _read_header(folder / SINGLE_FILE)


def _read_sharded(folder: Path) -> Mapping[str, Entry]:
    weight_map = _parse_object((folder / INDEX_FILE).read_bytes(), folder / INDEX_FILE)[
        "weight_map"
    ]
    assert isinstance(weight_map, dict)
    entries: dict[str, Entry] = {}
    for shard in sorted({str(shard) for shard in weight_map.values()}):
        if not (folder / shard).is_file():
            raise ModelError(
                f"{folder} lacks {shard}, which {INDEX_FILE} names; fetch the model again"
            )
        entries |= _read_header(folder / shard)
    for name in weight_map:
        if name not in entries:
            raise ModelError(
                f"tensor {name} is missing from {weight_map[name]}; fetch the model again"
            )
    return entries


def _read_header(path: Path) -> Mapping[str, Entry]:
    """A file is 8 bytes of header length, a JSON header and the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise ModelError(
                f"{path} is no safetensors file or is cut short; fetch the model again"
            )
        header = _parse_object(file.read(length), path)
    header.pop("__metadata__", None)
    entries = {name: _entry(path, 8 + length, item) for name, item in header.items()}
    for name, entry in entries.items():
        if entry.end > size:
            raise ModelError(
                f"tensor {name} is truncated: {path} ends at byte {size} of {entry.end}; "
                "fetch the model again"
            )
    return entries


def _entry(path: Path, base: int, item: Json) -> Entry:
    match item:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            sizes = tuple(size for size in shape if isinstance(size, int))
            return Entry(path, dtype, sizes, base + begin, base + end)
    raise ModelError(
        f"{path} has a header entry that is no tensor: {item!r}; fetch the model again"
    )


def _parse_object(data: bytes, path: Path) -> dict[str, Json]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; fetch the model again")
    return value
