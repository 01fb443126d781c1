"""What the tokens of a model folder stand for and which of them end an output; no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from protos.pieces import decoding
from target_workers.model.config import Json


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """`pieces[id]` are a token's bytes, empty for special tokens and for ids that are not used."""

    pieces: tuple[bytes, ...]
    end_tokens: frozenset[int]


def load_vocabulary(folder: Path) -> Vocabulary:
    """Of a folder with a tokenizer.json. Raises ValueError."""
    spec = _read(folder / "tokenizer.json")
    ids = _ids(spec)
    special = {id for id, _, is_special in _added(spec) if is_special}
    to_bytes = decoding(spec.get("decoder"))
    pieces = [b""] * (max(ids.values(), default=-1) + 1)
    for token, id in ids.items():
        pieces[id] = b"" if id in special else to_bytes(token)
    return Vocabulary(tuple(pieces), _end_tokens(folder, ids))


def _ids(spec: dict[str, Json]) -> dict[str, int]:
    """The ids of all tokens: of a mapping, or in order of a list of tokens with their scores."""
    added = {token: id for id, token, _ in _added(spec)}
    match spec:
        case {"model": {"vocab": dict() as vocab}}:
            return {token: id for token, id in vocab.items() if isinstance(id, int)} | added
        case {"model": {"vocab": [*entries]}}:
            return {str(entry[0]): id for id, entry in enumerate(entries)} | added
    raise ValueError("tokenizer.json has no vocabulary that is known")


def _added(spec: dict[str, Json]) -> list[tuple[int, str, bool]]:
    """Tokens beside the model's own: id, text, and whether they are special."""
    found = []
    entries = spec.get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"id": int(id), "content": str(token), **others}:
                found.append((id, token, others.get("special") is True))
    return found


def _end_tokens(folder: Path, ids: dict[str, int]) -> frozenset[int]:
    """Those of the generation settings or else the model's, and the tokenizer's own."""
    named = _read(folder / "generation_config.json").get("eos_token_id")
    if named is None:
        named = _read(folder / "config.json").get("eos_token_id")
    ends = named if isinstance(named, list) else [named]
    own = _read(folder / "tokenizer_config.json").get("eos_token")
    text = own.get("content") if isinstance(own, dict) else own
    own_id = ids.get(text) if isinstance(text, str) else None
    return frozenset(id for id in [*ends, own_id] if isinstance(id, int))


def _read(file: Path) -> dict[str, Json]:
    """A JSON object, empty if there is no such file. Raises ValueError."""
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} must hold a JSON object")
    return content
