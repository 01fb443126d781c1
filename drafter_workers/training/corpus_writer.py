"""Writes a corpus: shard by shard, each beside its place and then moved there, whole.

What was written stays, whatever happens to the next shard: a run goes on from it.
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from drafter_workers.training.corpus import (
    HEADER,
    CorpusError,
    Document,
    Origin,
    Shard,
    read_origin,
    shard_index,
    shard_paths,
)


class CorpusWriter:
    """Adds documents to a folder, a shard at a time; an interrupted one loses its open shard.

    One writer at a time: what an earlier one left half written is removed. `done` are the numbers
    that need not be written again, `tokens` those of all documents. Raises CorpusError.
    """

    def __init__(self, folder: Path, origin: Origin, shard_tokens: int = 1 << 16) -> None:
        self._folder = folder
        self._kept = origin.kept
        self._shard_tokens = shard_tokens
        self._open: list[Document] = []
        self._left_out: list[int] = []
        paths = shard_paths(folder)
        if paths:
            _check_same(folder, origin)
        else:
            _write_origin(folder, origin)
        for unfinished in folder.glob("*.part"):
            unfinished.unlink(missing_ok=True)
        self._next = shard_index(paths[-1]) + 1 if paths else 0
        shards = [Shard(path) for path in paths]
        self.tokens = sum(len(shard.tokens) for shard in shards)
        self.done = {
            int(number) for shard in shards for number in (*shard.numbers, *shard.left_out)
        }

    def add(self, document: Document) -> None:
        """Take a document; it is on disk once its shard is full or `flush` was called."""
        assert document.parts.keys() == set(self._kept.parts), "as the origin says"
        self._open.append(document)
        self.tokens += len(document.tokens)
        self.done.add(document.number)
        if sum(len(each.tokens) for each in self._open) >= self._shard_tokens:
            self.flush()

    def leave_out(self, number: int) -> None:
        """A conversation that is not taken; remembered with the next shard."""
        self._left_out.append(number)
        self.done.add(number)

    def flush(self) -> None:
        """Write what is open. Raises CorpusError if the disk has no room; nothing is lost of what
        was written before."""
        if not self._open:
            return
        path = self._folder / f"shard-{self._next:05}.safetensors"
        unfinished = path.with_suffix(".part")
        try:
            save_file(_stacked(self._open, self._left_out), unfinished)
            # safetensors lets its owner alone read a file.
            shutil.copymode(self._folder / HEADER, unfinished)
            _put_in_place(unfinished, path)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            raise _cannot_write(path, error) from error
        self._next += 1
        self._open.clear()
        self._left_out.clear()


def _check_same(folder: Path, origin: Origin) -> None:
    """Raise CorpusError if what a folder holds was not written so."""
    known, asked = asdict(read_origin(folder)), asdict(origin)
    different = [
        f"{name} {known[name]!r}, not {asked[name]!r}"
        for name in known
        if known[name] != asked[name]
    ]
    if different:
        raise CorpusError(
            f"{folder} holds another corpus ({'; '.join(different)}); give another folder, or the "
            "same target and options"
        )


def _write_origin(folder: Path, origin: Origin) -> None:
    """Say who writes a corpus; without a shard, what was said before means nothing."""
    path = folder / HEADER
    unfinished = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(asdict(origin), indent=1) + "\n")
        _put_in_place(unfinished, path)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _put_in_place(unfinished: Path, path: Path) -> None:
    """Give a file its name once all of it is on disk."""
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def _cannot_write(path: Path, error: Exception) -> CorpusError:
    return CorpusError(
        f"cannot write {path}: {error}; make room there, or make it writable, and run the same "
        "command again: it goes on where it stopped"
    )


def _stacked(documents: list[Document], left_out: list[int]) -> dict[str, Tensor]:
    lengths = np.array([0, *(len(each.tokens) for each in documents)])
    tensors = {
        "tokens": torch.from_numpy(np.concatenate([each.tokens for each in documents])).int(),
        "answers": torch.from_numpy(np.concatenate([each.answers for each in documents])).byte(),
        "bounds": torch.from_numpy(lengths.cumsum()),
        "numbers": torch.tensor([each.number for each in documents]),
    }
    if left_out:
        tensors["left_out"] = torch.tensor(left_out)
    for name in documents[0].parts:
        tensors[name] = torch.cat([each.parts[name] for each in documents])
    return tensors
