"""What lies in the safetensors files of a model folder, by their headers alone; no torch."""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


def model_hash(folder: Path | str) -> str:
    """Hash of what the model computes, cheap and the same for one file or shards.

    It covers config.json without the keys that only describe the saving, and for every tensor by
    name: type, shape, and the bytes at its start, middle and end. Raises ModelError.
    """
    folder = Path(folder)
    config = {k: v for k, v in read_config(folder).items() if k not in VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, entry in sorted(read_entries(folder).items()):
        digest.update(_sample(name, entry))
    return digest.hexdigest()[:32]


def ends_hash(folder: Path) -> str:
    """Hash of the embedding and the head alone: what a model may borrow. Raises ModelError."""
    entries = read_entries(folder)
    digest = hashlib.sha256()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name in entries:
            digest.update(_sample(name, entries[name]))
    return digest.hexdigest()[:32]


def _sample(name: str, entry: Entry) -> bytes:
    """A tensor's name, type and shape, and the bytes at its start, middle and end."""
    middle = (entry.begin + entry.end) // 2
    parts = [f"{name} {entry.dtype} {entry.shape}".encode()]
    with entry.path.open("rb") as file:
        for begin in (entry.begin, middle, max(entry.begin, entry.end - SAMPLE_BYTES)):
            file.seek(begin)
            parts.append(file.read(min(SAMPLE_BYTES, entry.end - begin)))
    return b"".join(parts)


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
