"""Prompts from JSON lines: for benchmarks, for corpora, and to be kept out of both."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.errors import ConfigError
from services.tokenizer import Tokenizer

COLUMNS = "`turns` (a list of texts), `prompt` (a text) or `messages` (role and content)"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says, turn by turn, and of what kind it is."""

    kind: str
    turns: tuple[str, ...]


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """All prompts of a file; `kind` or `category` names the kind. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    prompts = tuple(_prompts(path, lines))
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; give a file of JSON lines with {COLUMNS}")
    return prompts


def kept_out_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Every turn of the prompts in these files. Raises ConfigError."""
    for path in paths:
        for prompt in read_prompts(path):
            yield from prompt.turns


def text_of(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """What a conversation says. A special token ends a word: what stands around it are two."""
    return b"".join(tokenizer.pieces[id] or b" " for id in ids).decode("utf-8", errors="replace")


def _prompts(path: Path, lines: list[str]) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _prompt(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error


def _prompt(row: object) -> Prompt:
    """One line's. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    match row:
        case {"turns": [str(), *_] as turns} if all(isinstance(turn, str) for turn in turns):
            said = turns
        case {"prompt": str(prompt)}:
            said = [prompt]
        case {"messages": [dict(), *_] as messages} if all(isinstance(m, dict) for m in messages):
            said = [each.get("content") for each in messages if each.get("role") == "user"]
        case _:
            raise ValueError(f"has none of {COLUMNS}; it has {', '.join(row) or 'nothing'}")
    if not all(isinstance(turn, str) for turn in said):
        raise ValueError("has a `content` by the user that is no text")
    if not said or not all(turn.strip() for turn in said):
        raise ValueError("has an empty turn, or none by the user")
    for turn in said:
        turn.encode()  # half a pair of surrogates is no text
    return Prompt(str(row.get("kind") or row.get("category") or "all"), tuple(said))
