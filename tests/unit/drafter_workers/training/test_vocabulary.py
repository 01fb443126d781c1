"""A reduced vocabulary is what answers use most."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from drafter_workers.training.corpus import Corpus, Document, Origin
from drafter_workers.training.corpus_writer import CorpusWriter
from drafter_workers.training.vocabulary import most_used

# Questions use 9 most of all; only what is answered counts.
SAID = [([9] * 50, [3] * 5 + [7] * 4 + [1]), ([9], [7] * 2 + [5] * 3)]


def write(folder: Path, said: Sequence[tuple[list[int], list[int]]], seed: int = 0) -> Corpus:
    writer = CorpusWriter(folder, Origin("t", 12, seed, "s"))
    for number, (question, answer) in enumerate(said):
        tokens = np.array(question + answer, np.int64)
        writer.add(Document(number, tokens, np.arange(len(tokens)) >= len(question)))
    writer.flush()
    return Corpus(folder)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write(tmp_path / "corpus", SAID)


def test_the_most_used_are_kept_in_rising_order(corpus: Corpus) -> None:
    assert most_used([corpus], 2, ()) == (3, 7)
    assert most_used([corpus], 3, ()) == (3, 5, 7)
    assert most_used([corpus], 4, ()) == (1, 3, 5, 7)


def test_some_are_kept_always(corpus: Corpus) -> None:
    assert most_used([corpus], 2, (11,)) == (7, 11)
    assert most_used([corpus], 2, (11, 2, 11)) == (2, 11)


def test_ties_go_to_the_lowest_and_more_than_all_is_all(corpus: Corpus) -> None:
    assert most_used([corpus], 6, ()) == (0, 1, 2, 3, 5, 7)
    assert most_used([corpus], 99, (4,)) == tuple(range(12))


def test_corpora_are_counted_together(corpus: Corpus, tmp_path: Path) -> None:
    other = write(tmp_path / "other", [([0], [1] * 9)], seed=1)
    assert most_used([corpus, other], 2, ()) == (1, 7)
