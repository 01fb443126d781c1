"""What goes into a corpus: each question once, answered, and nothing that is kept out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from drafter_workers.training import sieve as module
from drafter_workers.training.corpus import Corpus, CorpusError, Document, Origin
from drafter_workers.training.corpus_writer import CorpusWriter
from drafter_workers.training.overlap import KeptOut
from drafter_workers.training.sieve import Sieve

ORIGIN = Origin("target", 100, 0, "self-written")
KEPT_OUT = KeptOut(["w7 w8"])


def text(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def document(number: int, question: list[int], answer: list[int]) -> Document:
    answers = np.array([False] * len(question) + [True] * len(answer))
    return Document(number, np.array(question + answer), answers)


@pytest.fixture
def writer(tmp_path: Path) -> CorpusWriter:
    return CorpusWriter(tmp_path, ORIGIN)


def test_what_is_left_out_is_counted_and_done(writer: CorpusWriter, tmp_path: Path) -> None:
    sieve = Sieve(text, KEPT_OUT, writer)
    sieve.take(document(0, [1, 2], [3]))
    sieve.take(document(1, [1, 2], [4]))  # asked before
    sieve.take(document(2, [1, 2, 5], [4]))  # another question
    sieve.take(document(3, [6], []))
    sieve.take(document(4, [6, 7], [8]))
    sieve.take(document(5, [6], [8]))  # its question was never answered before
    writer.flush()
    corpus = Corpus(tmp_path)
    assert corpus.shards[0].numbers.tolist() == [0, 2, 5]
    assert corpus.shards[0].left_out.tolist() == [1, 3, 4]
    assert writer.done == set(range(6))
    assert sieve.left_out == (
        "1 asked before, 1 without an answer, 1 with words of prompts that are kept out"
    )


def test_what_an_earlier_run_asked_is_not_asked_again(writer: CorpusWriter, tmp_path: Path) -> None:
    writer.add(document(0, [1, 2], [3]))
    writer.flush()
    sieve = Sieve(text, KEPT_OUT, writer)
    sieve.remember(Corpus(tmp_path))
    sieve.take(document(1, [1, 2], [4]))
    sieve.take(document(2, [1, 3], [4]))
    assert sieve.left_out.startswith("1 asked before, 0 ")


def test_a_target_that_repeats_itself_is_given_up(
    writer: CorpusWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 3)
    sieve = Sieve(text, KEPT_OUT, writer)
    for number, question in enumerate([1, 1, 1, 2, 1, 1]):
        sieve.take(document(number, [question], [3]))
    with pytest.raises(CorpusError, match=r"last 3 .*\(5 asked before.*ask for fewer tokens"):
        sieve.take(document(6, [1], [3]))
