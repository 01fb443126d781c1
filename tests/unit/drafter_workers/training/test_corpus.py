"""A corpus on disk is whole or absent, goes on where it stopped, and says what is wrong with it."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter_workers.training import corpus as module
from drafter_workers.training.corpus import (
    Corpus,
    CorpusError,
    CorpusWriter,
    Document,
    Kept,
    Origin,
    shard_paths,
)
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


def test_another_corpus_is_not_mixed_in(tmp_path: Path) -> None:
    CorpusWriter(tmp_path, ORIGIN)
    with pytest.raises(CorpusError, match=r"another corpus \(seed, kept\)"):
        CorpusWriter(tmp_path, Origin("target", 100, 1, "self-written", Kept()))


def test_a_full_disk_loses_nothing_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=1)
    writer.add(document(0, 6))

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", full)
        with pytest.raises(CorpusError, match=r"No space left.*run the same command again"):
            writer.add(document(1, 6))
    same(Corpus(tmp_path), [document(0, 6)])
    assert CorpusWriter(tmp_path, ORIGIN).done == {0}


def cut(folder: Path) -> None:
    (path,) = shard_paths(folder)
    path.write_bytes(path.read_bytes()[:-3])


def garble(folder: Path) -> None:
    (folder / "corpus.json").write_text("{")


def drop(folder: Path) -> None:
    (folder / "corpus.json").unlink()


def strip(folder: Path) -> None:
    raw = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({"seed": raw["seed"]}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(cut, "is no whole shard"), (garble, "cannot be read"), (drop, "holds no corpus"),
     (strip, "cannot be read")],
)  # fmt: skip
def test_a_spoilt_corpus_is_named(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    writer = CorpusWriter(tmp_path, ORIGIN, shard_tokens=1)
    writer.add(document(0, 6))
    spoil(tmp_path)
    with pytest.raises(CorpusError, match=said):
        Corpus(tmp_path)


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
