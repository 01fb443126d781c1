"""What a target wrote, on disk: shards of documents, memory-mapped, each whole or absent.

A folder holds `corpus.json`, which says who wrote it and how, and `shard-N.safetensors`:

    tokens   int32 [n]          all documents of the shard, one after the other
    answers  uint8 [n]          1 where a token belongs to an answer
    bounds   int64 [docs + 1]   where each document begins, and the last ends
    numbers  int64 [docs]       each document's number in the plan
    states   bf16  [n, hidden]  the target's normed hidden state after each token, where kept
    top_ids, top_logits, log_sums: its best tokens, their logits and the sum of all, where kept
    left_out int64 [any]        numbers whose conversations were written and not taken, where any
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

HEADER = "corpus.json"
TOKEN_BYTES = 4 + 1
STATE_BYTES = 2
TOP_BYTES = 4 + 2
LOG_SUM_BYTES = 4


class CorpusError(Exception):
    """A corpus that cannot be written or read: the message gives the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of the target beside its tokens: states of so many values, best tokens."""

    state_size: int = 0
    top: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes on disk for each token."""
        top = self.top * TOP_BYTES + LOG_SUM_BYTES if self.top else 0
        return TOKEN_BYTES + self.state_size * STATE_BYTES + top

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what is kept."""
        states = ("states",) if self.state_size else ()
        return (*states, *(("top_ids", "top_logits", "log_sums") if self.top else ()))


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a corpus, and how: one can be gone on with by the same origin only."""

    target_hash: str
    vocab_size: int
    seed: int
    source: str
    kept: Kept = field(default_factory=Kept)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One conversation; `parts` has what is kept of the target for each token, by name."""

    number: int
    tokens: NDArray[np.int64]  # [n]
    answers: NDArray[np.bool_]  # [n]
    parts: Mapping[str, Tensor] = field(default_factory=dict)


class Shard:
    """One shard, mapped: a part is read when it is asked for. Raises CorpusError."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
            self.names = frozenset(self._file.keys())
            self.tokens = self._array("tokens", np.int32)
            self.answers = self._array("answers", np.uint8).view(bool)
            self.bounds = self._array("bounds", np.int64)
            self.numbers = self._array("numbers", np.int64)
            has_left_out = "left_out" in self.names
            self.left_out = self._array("left_out", np.int64) if has_left_out else self.numbers[:0]
            self._check()
        except (SafetensorError, OSError, ValueError) as error:
            raise CorpusError(
                f"{path} is no whole shard ({error}); delete it and run the same capture again"
            ) from error

    def part(self, name: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of what is kept under `name`."""
        rows: Tensor = self._file.get_slice(name)[begin:end]
        return rows

    def shape(self, name: str) -> tuple[int, ...]:
        """Of what is kept under `name`."""
        return tuple(self._file.get_slice(name).get_shape())

    def _array(self, name: str, kind: type[np.integer[Any]]) -> NDArray[Any]:
        array: NDArray[Any] = self._file.get_tensor(name).numpy()
        if array.dtype != kind or array.ndim != 1:
            raise ValueError(f"its {name} are no row of {kind.__name__}")
        return array

    def _check(self) -> None:
        """Raise ValueError if its arrays do not belong together."""
        if len(self.answers) != len(self.tokens):
            raise ValueError("it has other answers than tokens")
        ends = (0, len(self.tokens))
        if len(self.bounds) != len(self.numbers) + 1 or (self.bounds[0], self.bounds[-1]) != ends:
            raise ValueError("its bounds are not those of its documents")
        if (np.diff(self.bounds) < 1).any():
            raise ValueError("a document ends before it begins")


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [begin, end) of one document of a shard."""

    shard: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


class Corpus:
    """A written folder, to be read at random. Raises CorpusError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.origin = read_origin(folder)
        self.shards = [Shard(path) for path in shard_paths(folder)]
        if not self.shards:
            raise CorpusError(f"{folder} has no shard yet; run paceline capture into it")
        for path, shard in zip(shard_paths(folder), self.shards, strict=True):
            if wrong := _unlike(shard, self.origin):
                raise CorpusError(
                    f"{path} {wrong} as {HEADER} says; delete it and run the same capture again"
                )

    @property
    def size(self) -> int:
        """Tokens in all."""
        return sum(len(shard.tokens) for shard in self.shards)

    @property
    def documents(self) -> list[Span]:
        """Every document, in the order of the plan."""
        spans = [
            (int(number), Span(i, int(begin), int(end)))
            for i, shard in enumerate(self.shards)
            for number, begin, end in zip(
                shard.numbers, shard.bounds[:-1], shard.bounds[1:], strict=True
            )
        ]
        return [span for _, span in sorted(spans, key=lambda pair: pair[0])]

    def tokens(self, span: Span) -> NDArray[np.int64]:
        """The ids of a span."""
        tokens: NDArray[np.int32] = self.shards[span.shard].tokens[span.begin : span.end]
        return tokens.astype(np.int64)

    def answers(self, span: Span) -> NDArray[np.bool_]:
        """Which tokens of a span belong to answers."""
        answers: NDArray[np.bool_] = self.shards[span.shard].answers[span.begin : span.end]
        return answers

    def part(self, name: str, span: Span) -> Tensor:
        """What is kept under `name` for the tokens of a span."""
        return self.shards[span.shard].part(name, span.begin, span.end)


def _unlike(shard: Shard, origin: Origin) -> str:
    """What a shard lacks of what its origin promises; empty if nothing."""
    kept, rows = origin.kept, len(shard.tokens)
    widths = {"states": (kept.state_size,), "log_sums": ()}
    shapes = {name: (rows, *widths.get(name, (kept.top,))) for name in kept.parts}
    for name, shape in shapes.items():
        if name not in shard.names or shard.shape(name) != shape:
            return f"has no {name} of shape {list(shape)}"
    if rows and not 0 <= shard.tokens.min() <= shard.tokens.max() < origin.vocab_size:
        return f"does not have tokens below {origin.vocab_size} alone"
    return ""


def shard_paths(folder: Path) -> list[Path]:
    """The whole shards of a folder, in order."""
    return sorted(folder.glob("shard-[0-9]*.safetensors"), key=shard_index)


def read_origin(folder: Path) -> Origin:
    """Who wrote a corpus. Raises CorpusError."""
    path = folder / HEADER
    if not path.is_file():
        if shard_paths(folder):
            raise CorpusError(
                f"{folder} has shards and no {HEADER} that says whose; put it back, or capture "
                "into another folder"
            )
        raise CorpusError(f"{folder} holds no corpus; run paceline capture into it")
    try:
        raw = json.loads(path.read_text())
        return Origin(**(raw | {"kept": Kept(**raw["kept"])}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CorpusError(
            f"{path} cannot be read ({type(error).__name__}: {error}); put it back, or capture "
            "into another folder"
        ) from error


def shard_index(path: Path) -> int:
    """The place of a shard in its folder, by its name."""
    return int(path.stem.removeprefix("shard-"))
