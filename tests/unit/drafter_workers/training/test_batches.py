"""Batches over documents whose every token is its own, so that each can be told from all others."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter_workers.training.batches import SHORTEST, Batch, BatchConfig, Batches
from drafter_workers.training.corpus import Corpus, CorpusError, Document, Kept, Origin
from drafter_workers.training.corpus_writer import CorpusWriter

LENGTHS = [int(n) for n in np.random.default_rng(1).integers(5, 90, 70)]
CONFIG = BatchConfig(length=32, tokens=128, seed=2, held_out=0.1)


def write(folder: Path, lengths: Sequence[int], first: int = 0, seed: int = 0) -> Corpus:
    """Documents of these lengths; tokens count up from `first`, and a state is its token."""
    writer = CorpusWriter(folder, Origin("t", 1 << 20, seed, "s", Kept(state_size=1)), 400)
    for number, length in enumerate(lengths):
        tokens = np.arange(first, first + length)
        states = torch.from_numpy(tokens % 100).bfloat16()[:, None]
        writer.add(Document(number, tokens, tokens % 3 == 0, {"states": states}))
        first += length
    writer.flush()
    return Corpus(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write(tmp_path_factory.mktemp("corpus"), LENGTHS)


def tokens(batches: Iterable[Batch]) -> list[int]:
    """All real ones, in rising order."""
    return sorted(token for batch in batches for token in batch.tokens[batch.real].tolist())


def epoch(batches: Batches) -> int:
    """How many steps have as many tokens as an epoch."""
    left = batches.tokens
    for step, batch in enumerate(batches.steps(0), 1):
        left -= int(batch.real.sum())
        if left <= 0:
            assert left == 0
            return step
    raise AssertionError


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_a_later_start_skips_and_a_stride_picks(corpus: Corpus, stride: int) -> None:
    batches = Batches([corpus], CONFIG)
    count = 3 * epoch(batches)
    every = [batch.tokens for batch in islice(batches.steps(0), count)]
    for start in (0, 1, count // 3 - 1, count // 3, count // 2, count - 2):
        fresh = Batches([corpus], CONFIG)
        expected = every[start::stride]
        got = list(islice(fresh.steps(start, stride), len(expected)))
        assert all(torch.equal(a.tokens, b) for a, b in zip(got, expected, strict=True))


def test_workers_share_an_epoch_without_gap_or_repetition(corpus: Corpus) -> None:
    batches = Batches([corpus], CONFIG)
    count = epoch(batches)
    shares = [islice(batches.steps(rank, 3), len(range(rank, count, 3))) for rank in range(3)]
    together = tokens(batch for share in shares for batch in share)
    assert together == tokens(islice(batches.steps(0), count))


def test_every_epoch_has_each_token_once_in_another_order(corpus: Corpus) -> None:
    batches = Batches([corpus], CONFIG)
    source, seen = batches.steps(0), list[tuple[list[int], list[Batch]]]()
    for _ in range(3):
        taken, size = list[Batch](), 0
        while size < batches.tokens:
            taken.append(next(source))
            size += int(taken[-1].real.sum())
        seen.append((tokens(taken), taken))
    held = tokens(batches.held_out(1 << 30))
    for read, _ in seen:
        assert read == seen[0][0] and len(set(read)) == len(read)
        assert not set(read) & set(held)
    assert not torch.equal(seen[0][1][0].tokens, seen[1][1][0].tokens)
    lost = set(range(sum(LENGTHS))) - set(seen[0][0]) - set(held)
    rests = [n % 32 for n in LENGTHS if n % 32 < SHORTEST]
    assert len(lost) == sum(rests), "rests of documents alone are left out"


def test_no_document_is_partly_held_out(corpus: Corpus) -> None:
    batches = Batches([corpus], CONFIG)
    held = set(tokens(batches.held_out(1 << 30)))
    first = 0
    for length in LENGTHS:
        own = set(range(first, first + length))
        rest = length % 32 if length % 32 < SHORTEST else 0
        assert len(held & own) in (0, length - rest)
        first += length


def test_what_is_held_out_depends_on_the_seed_alone(corpus: Corpus) -> None:
    held = tokens(Batches([corpus], CONFIG).held_out(1 << 30))
    longer = BatchConfig(length=64, tokens=512, seed=2, held_out=0.1)
    assert {*held} <= {*tokens(Batches([corpus], longer).held_out(1 << 30))}
    other = BatchConfig(length=32, tokens=128, seed=3, held_out=0.1)
    assert tokens(Batches([corpus], other).held_out(1 << 30)) != held
    few = tokens(Batches([corpus], CONFIG).held_out(40))
    assert {*few} < {*held} and 40 <= len(few) < 40 + 32


def test_rows_are_pieces_and_a_batch_keeps_to_its_bound(corpus: Corpus) -> None:
    for batch in islice(Batches([corpus], CONFIG).steps(0), 60):
        assert batch.tokens.numel() <= 128
        assert batch.tokens.shape == batch.real.shape == batch.answers.shape
        for row, real, answers, states in zip(
            batch.tokens, batch.real, batch.answers, batch.parts["states"], strict=True
        ):
            size = int(real.sum())
            assert SHORTEST <= size <= 32 and bool(real[:size].all())
            assert row[:size].tolist() == list(range(int(row[0]), int(row[0]) + size))
            assert answers[:size].tolist() == [token % 3 == 0 for token in row[:size].tolist()]
            assert torch.equal(states[:size, 0].float(), (row[:size] % 100).float())
            assert not bool(answers[size:].any()) and not bool(states[size:].any())


def test_several_corpora_are_one(corpus: Corpus, tmp_path: Path) -> None:
    other = write(tmp_path, [40] * 20, first=sum(LENGTHS), seed=1)
    batches = Batches([corpus, other], CONFIG)
    read = tokens(islice(batches.steps(0), epoch(batches)))
    assert {*read} & {*range(sum(LENGTHS))} and max(read) >= sum(LENGTHS)
    with pytest.raises(CorpusError, match="the same documents"):
        Batches([corpus, Corpus(corpus.folder)], CONFIG)


def test_too_little_is_refused(tmp_path: Path) -> None:
    for name, lengths in (("one", [40]), ("short", [5] * 30), ("none held", [40, 3, 3])):
        with pytest.raises(CorpusError, match="too few documents"):
            Batches([write(tmp_path / name, lengths)], BatchConfig(32, 128, 0, held_out=0.5))


@pytest.mark.parametrize(
    "wrong", [{"length": 15}, {"length": 64, "tokens": 63}, {"held_out": 0.0}, {"held_out": 1.0}]
)
def test_bounds_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must hold a crop|the share held out"):
        BatchConfig(**wrong)  # type: ignore[arg-type]
