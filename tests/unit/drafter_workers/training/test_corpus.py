"""A corpus on disk is whole or absent, goes on where it stopped, and says what is wrong with it."""

import errno
import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_workers.training import corpus_writer
from drafter_workers.training.corpus import (
    Corpus,
    CorpusError,
    Document,
    Kept,
    Origin,
    shard_paths,
)
from drafter_workers.training.corpus_writer import CorpusWriter
from drafter_workers.training.vocabulary import most_used

ORIGIN = Origin("target", 100, 0, "self-written", Kept(state_size=4, top=2))


def document(number: int, size: int) -> Document:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(100, (size,), generator=generator).numpy()
    answers = np.arange(size) >= size // 2
    parts = {
        "states": torch.randn(size, 4, generator=generator).bfloat16(),
        "top_ids": torch.randint(100, (size, 2), generator=generator).int(),
        "top_logits": torch.randn(size, 2, generator=generator).half(),
        "log_sums": torch.randn(size, generator=generator),
    }
    return Document(number, tokens, answers, parts)


def same(corpus: Corpus, documents: list[Document]) -> None:
    spans = corpus.documents
    assert len(spans) == len(documents)
    for span, each in zip(spans, sorted(documents, key=lambda d: d.number), strict=True):
        assert corpus.tokens(span).tolist() == each.tokens.tolist()
        assert corpus.answers(span).tolist() == each.answers.tolist()
        for name, part in each.parts.items():
            assert torch.equal(corpus.part(name, span), part), name


def test_what_is_written_is_read_in_the_order_of_the_plan(tmp_path: Path) -> None:
    documents = [document(number, 5 + number) for number in (3, 0, 2, 7, 1)]
    writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=12)
    for each in documents:
        writer.add(each)
    writer.flush()
    assert len(shard_paths(tmp_path)) > 1
    corpus = Corpus(tmp_path)
    same(corpus, documents)
    assert corpus.size == writer.tokens == sum(len(each.tokens) for each in documents)


def test_an_interrupted_corpus_goes_on(tmp_path: Path) -> None:
    first = CorpusWriter(tmp_path, ORIGIN, shard_tokens=10)
    first.add(document(0, 12))
    first.add(document(1, 5))  # its shard is never written
    (tmp_path / "shard-00009.part").write_bytes(b"cut")
    second = CorpusWriter(tmp_path, ORIGIN, shard_tokens=10)
    assert (second.done, second.tokens) == ({0}, 12)
    second.add(document(1, 5))
    second.flush()
    same(Corpus(tmp_path), [document(0, 12), document(1, 5)])


def test_what_is_left_out_is_remembered_with_what_was_taken(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=10)
    writer.leave_out(0)
    writer.add(document(1, 12))
    writer.leave_out(2)  # the shard it would be in is never written
    assert writer.done == {0, 1, 2}
    again = CorpusWriter(tmp_path, ORIGIN)
    assert again.done == {0, 1}
    again.flush()
    again.add(document(3, 5))
    again.flush()
    assert CorpusWriter(tmp_path, ORIGIN).done == {0, 1, 3}
    same(Corpus(tmp_path), [document(1, 12), document(3, 5)])


def test_a_shard_of_before_there_was_anything_left_out_is_read(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN)
    writer.add(document(4, 6))
    writer.flush()
    (shard,) = Corpus(tmp_path).shards
    assert "left_out" not in shard.names
    assert shard.left_out.tolist() == []


def test_a_shard_that_was_deleted_is_written_anew(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=1)
    for number in range(3):
        writer.add(document(number, 6))
    shard_paths(tmp_path)[1].unlink()
    again = CorpusWriter(tmp_path, ORIGIN)
    assert again.done == {0, 2}
    again.add(document(1, 6))
    again.flush()
    same(Corpus(tmp_path), [document(number, 6) for number in range(3)])


def test_shards_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=1)
    writer.add(document(0, 6))
    shard_paths(tmp_path)[0].rename(tmp_path / "shard-99999.safetensors")
    for number in (1, 2):
        writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=1)
        writer.add(document(number, 6))
    assert [path.stem for path in shard_paths(tmp_path)] == [
        "shard-99999", "shard-100000", "shard-100001"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Origin("other", 100, 0, "self-written", ORIGIN.kept), "target_hash 'target', not 'other'"),
        (Origin("target", 100, 1, "self-written", ORIGIN.kept), "seed 0, not 1"),
        (Origin("target", 100, 0, "x.jsonl", ORIGIN.kept), "source 'self-written', not 'x.jsonl'"),
        (Origin("target", 100, 0, "self-written"), "kept {'state_size': 4, 'top': 2}, not"),
    ],
)
def test_another_corpus_is_not_mixed_in(tmp_path: Path, other: Origin, said: str) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN)
    writer.add(document(0, 6))
    writer.flush()
    with pytest.raises(CorpusError, match="another folder") as raised:
        CorpusWriter(tmp_path, other)
    assert f"holds another corpus ({said}" in str(raised.value)
    same(Corpus(tmp_path), [document(0, 6)])


def test_a_corpus_that_never_began_can_become_another(tmp_path: Path) -> None:
    CorpusWriter(tmp_path, ORIGIN)
    other = Origin("target", 100, 1, "self-written", ORIGIN.kept)
    writer = CorpusWriter(tmp_path, other)
    writer.add(document(0, 6))
    writer.flush()
    assert Corpus(tmp_path).origin == other


def test_a_full_disk_loses_nothing_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=1)
    writer.add(document(0, 6))

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(corpus_writer, "save_file", full)
        with pytest.raises(CorpusError, match=r"No space left.*run the same command again"):
            writer.add(document(1, 6))
    same(Corpus(tmp_path), [document(0, 6)])
    assert not list(tmp_path.glob("*.part"))
    assert CorpusWriter(tmp_path, ORIGIN).done == {0}
    writer.flush()  # what was open is not lost either, where the process lives on
    same(Corpus(tmp_path), [document(0, 6), document(1, 6)])


def test_a_file_that_may_not_grow_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """The same by the operating system's own refusal."""
    writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=1)
    writer.add(document(0, 6))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
        with pytest.raises(CorpusError, match=r"cannot write .*shard-00001.*make room"):
            writer.add(document(1, 600))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    same(Corpus(tmp_path), [document(0, 6)])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusError, match=r"cannot write .*corpus\.json.*make room there"):
        CorpusWriter(tmp_path / "file" / "corpus", ORIGIN)


def cut(folder: Path) -> None:
    (path,) = shard_paths(folder)
    path.write_bytes(path.read_bytes()[:-3])


def empty(folder: Path) -> None:
    (path,) = shard_paths(folder)
    path.write_bytes(b"")


def no_parts(folder: Path) -> None:
    raw = json.loads((folder / "corpus.json").read_text())
    (path,) = shard_paths(folder)
    path.unlink()
    (folder / "corpus.json").unlink()
    writer = CorpusWriter(folder, Origin(**(raw | {"kept": Kept()})))
    writer.add(Document(0, np.arange(3), np.ones(3, bool)))
    writer.flush()
    (folder / "corpus.json").write_text(json.dumps(raw))


def garble(folder: Path) -> None:
    (folder / "corpus.json").write_text("{")


def drop(folder: Path) -> None:
    (folder / "corpus.json").unlink()


def strip(folder: Path) -> None:
    raw = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({"seed": raw["seed"]}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "is no whole shard .* delete it and run the same capture again"),
        (empty, "is no whole shard .* delete it"),
        (no_parts, r"has no states of shape \[3, 4\] .* delete it"),
        (garble, "cannot be read .* put it back, or capture into another folder"),
        (drop, r"has shards and no corpus\.json .* put it back, or capture into another folder"),
        (strip, "cannot be read .* put it back"),
    ],
)
def test_a_spoilt_corpus_is_named(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=1)
    writer.add(document(0, 6))
    spoil(tmp_path)
    with pytest.raises(CorpusError, match=said):
        Corpus(tmp_path)
    if spoil is not no_parts:
        with pytest.raises(CorpusError, match=said):
            CorpusWriter(tmp_path, ORIGIN)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("tokens", lambda tokens: tokens - 1000, "does not have tokens below 100 alone"),
        ("tokens", lambda tokens: tokens + 100, "does not have tokens below 100 alone"),
        ("tokens", lambda tokens: tokens.double(), r"no whole shard \(its tokens are no row of"),
        ("answers", lambda answers: answers[:-1], "other answers than tokens"),
        ("bounds", lambda bounds: bounds + 1, "bounds are not those"),
        ("bounds", lambda bounds: bounds[:-1], "bounds are not those"),
        ("bounds", lambda bounds: bounds[[0, 0, 2]], "ends before it begins"),
        ("states", lambda states: states[:, :3], r"has no states of shape \[18, 4\]"),
        ("log_sums", lambda sums: sums[1:], r"has no log_sums of shape \[18\]"),
    ],
)
def test_a_shard_whose_parts_do_not_belong_together_is_named(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], said: str
) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN)
    for number in (0, 1):
        writer.add(document(number, 9))
    writer.flush()
    (path,) = shard_paths(tmp_path)
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name]).contiguous()}, path)
    with pytest.raises(CorpusError, match=f"{said}.* delete it and run the same capture again"):
        Corpus(tmp_path)


def test_whoever_may_read_a_corpus_s_header_may_read_its_shards(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN)
    (tmp_path / "corpus.json").chmod(0o640)
    writer.add(document(0, 6))
    writer.flush()
    (path,) = shard_paths(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_folder_without_a_corpus_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="holds no corpus; run paceline capture"):
        Corpus(tmp_path / "nowhere")


def test_an_empty_corpus_says_what_to_do(tmp_path: Path) -> None:
    CorpusWriter(tmp_path, ORIGIN)
    with pytest.raises(CorpusError, match="run paceline capture"):
        Corpus(tmp_path)


def test_a_vocabulary_has_what_answers_use_most(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN)
    tokens = np.array([50, 50, 50, 7, 7, 9, 9, 9, 1])
    answers = np.array([False] * 3 + [True] * 6)
    parts = {name: part[:9] for name, part in document(0, 9).parts.items()}
    writer.add(Document(0, tokens, answers, parts))
    writer.flush()
    corpora = [Corpus(tmp_path)]
    assert most_used(corpora, 2, ()) == (7, 9)
    assert most_used(corpora, 3, (80,)) == (7, 9, 80)
    assert len(most_used(corpora, 1000, ())) == 100
