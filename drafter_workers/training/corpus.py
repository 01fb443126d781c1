"""What a target wrote, on disk: shards of documents, memory-mapped, each whole or absent.

A folder holds `corpus.json`, which says who wrote it and how, and `shard-N.safetensors`:

    tokens   int32 [n]          all documents of the shard, one after the other
    answers  uint8 [n]          1 where a token belongs to an answer
    bounds   int64 [docs + 1]   where each document begins, and the last ends
    numbers  int64 [docs]       each document's number in the plan
    states   bf16  [n, hidden]  the target's normed hidden state after each token, where kept
    top_ids, top_logits, log_sums: its best tokens, their logits and the sum of all, where kept
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

HEADER = "corpus.json"
TOKEN_BYTES = 4 + 1
STATE_BYTES = 2
TOP_BYTES = 4 + 2


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
        top = self.top * TOP_BYTES + 4 if self.top else 0
        return TOKEN_BYTES + self.state_size * STATE_BYTES + top


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a corpus, and how: two with the same origin are the same documents."""

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


class CorpusWriter:
    """Adds documents to a folder, a shard at a time; an interrupted one loses its open shard."""

    def __init__(self, folder: Path, origin: Origin, shard_tokens: int = 1 << 16) -> None:
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._open: list[Document] = []
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / HEADER).is_file():
            known = read_origin(folder)
            if known != origin:
                raise CorpusError(
                    f"{folder} holds another corpus ({_difference(known, origin)}); "
                    "give another folder, or the same target and options"
                )
        else:
            (folder / HEADER).write_text(json.dumps(asdict(origin), indent=1) + "\n")
        shards = [Shard(path) for path in shard_paths(folder)]
        self._next = len(shards)
        self.tokens = sum(len(shard.tokens) for shard in shards)
        self.done = {int(number) for shard in shards for number in shard.numbers}

    def add(self, document: Document) -> None:
        """Take a document; it is on disk once its shard is full or `flush` was called."""
        self._open.append(document)
        self.tokens += len(document.tokens)
        self.done.add(document.number)
        if sum(len(each.tokens) for each in self._open) >= self._shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is open. Raises CorpusError if the disk has no room; nothing is lost of what
        was written before."""
        if not self._open:
            return
        path = self._folder / f"shard-{self._next:05}.safetensors"
        unfinished = path.with_suffix(".part")
        try:
            save_file(_stacked(self._open), unfinished)
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            raise CorpusError(
                f"cannot write {path}: {error}; make room and run the same command again: "
                "it goes on where it stopped"
            ) from error
        self._next += 1
        self._open.clear()


class Shard:
    """One shard, mapped: a part is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
            self.tokens = self._file.get_tensor("tokens").numpy().astype(np.int64)
            self.answers = self._file.get_tensor("answers").numpy().astype(bool)
            self.bounds = self._file.get_tensor("bounds").numpy()
            self.numbers = self._file.get_tensor("numbers").numpy()
        except (SafetensorError, OSError) as error:
            raise CorpusError(f"{path} is no whole shard ({error}); delete it") from error

    def part(self, name: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of what is kept under `name`."""
        rows: Tensor = self._file.get_slice(name)[begin:end]
        return rows


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
        tokens: NDArray[np.int64] = self.shards[span.shard].tokens[span.begin : span.end]
        return tokens

    def answers(self, span: Span) -> NDArray[np.bool_]:
        """Which tokens of a span belong to answers."""
        answers: NDArray[np.bool_] = self.shards[span.shard].answers[span.begin : span.end]
        return answers

    def part(self, name: str, span: Span) -> Tensor:
        """What is kept under `name` for the tokens of a span."""
        return self.shards[span.shard].part(name, span.begin, span.end)


def shard_paths(folder: Path) -> list[Path]:
    """The whole shards of a folder, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_origin(folder: Path) -> Origin:
    """Who wrote a corpus. Raises CorpusError."""
    path = folder / HEADER
    if not path.is_file():
        raise CorpusError(f"{folder} holds no corpus; run paceline capture into it")
    try:
        raw = json.loads(path.read_text())
        return Origin(**(raw | {"kept": Kept(**raw["kept"])}))
    except (ValueError, TypeError, KeyError) as error:
        raise CorpusError(f"{path} cannot be read ({error}); capture anew") from error


def _stacked(documents: list[Document]) -> dict[str, Tensor]:
    lengths = np.array([0, *(len(each.tokens) for each in documents)])
    tensors = {
        "tokens": torch.from_numpy(np.concatenate([each.tokens for each in documents])).int(),
        "answers": torch.from_numpy(np.concatenate([each.answers for each in documents])).byte(),
        "bounds": torch.from_numpy(lengths.cumsum()),
        "numbers": torch.tensor([each.number for each in documents]),
    }
    for name in documents[0].parts:
        tensors[name] = torch.cat([each.parts[name] for each in documents])
    return tensors


def _difference(known: Origin, asked: Origin) -> str:
    names = (name for name, value in asdict(known).items() if value != asdict(asked)[name])
    return ", ".join(names)
