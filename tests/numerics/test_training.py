"""Training on a tiny target: it learns, and a kill or a bad number loses nothing."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter_workers.training.batches import Batch, BatchConfig, Batches
from drafter_workers.training.checkpoints import FILE, kept_step
from drafter_workers.training.corpus import Corpus, Kept
from drafter_workers.training.errors import TrainingError
from drafter_workers.training.loop import Host, LoopConfig, Record, train
from tests.tiny_training import make_target, make_task, run, write_corpus

ROOT = Path(__file__).parents[2]
STEPS = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpus(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(target, tmp_path_factory.mktemp("corpus"), 200)


@pytest.fixture(scope="module")
def trained(
    target: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Record]]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(target, corpus, folder, STEPS)[1]


def weights(folder: Path) -> dict[str, Tensor]:
    held: dict[str, Tensor] = torch.load(folder / FILE, weights_only=True)["trained"]
    return held


def test_the_loss_falls_and_held_out_acceptance_rises(trained: tuple[Path, list[Record]]) -> None:
    _, records = trained
    losses = [record.values["loss"] for record in records if "loss" in record.values]
    looks = [record.values for record in records if "acceptance" in record.values]
    assert losses[-1] < 0.7 * losses[0]
    for name in ("agreement", "acceptance", "accepted_length"):
        assert looks[-1][name] > looks[0][name], name


@pytest.mark.long
def test_a_longer_run_learns_more(target: Path, tmp_path: Path) -> None:
    corpus = write_corpus(target, tmp_path / "corpus", 2000)
    _, records = run(target, corpus, tmp_path / "out", 1600)
    losses = [record.values["loss"] for record in records if "loss" in record.values]
    looks = [record.values for record in records if "acceptance" in record.values]
    assert np.mean(losses[-20:]) < 0.5 * losses[0]
    assert looks[-1]["accepted_length"] > 1.15 * looks[0]["accepted_length"]
    for name in ("agreement", "acceptance"):
        assert looks[-1][name] > 1.5 * looks[0][name], name
        assert looks[-1][name] > looks[10][name] > looks[0][name], name


def test_a_killed_run_ends_with_the_same_weights(
    target: Path, corpus: Corpus, trained: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    folder = corpus.folder
    command = [sys.executable, "-m", "tests.tiny_training", str(target), str(folder)]
    for killed_at in (23, 31):
        process = subprocess.run([*command, str(tmp_path), str(STEPS), str(killed_at)], cwd=ROOT)
        assert process.returncode == -signal.SIGKILL
        assert kept_step(tmp_path) == killed_at - killed_at % 5
    run(target, corpus, tmp_path, STEPS)
    for name, tensor in weights(trained[0]).items():
        assert torch.equal(tensor, weights(tmp_path)[name]), name
    whole, again = (torch.load(at / FILE, weights_only=True) for at in (trained[0], tmp_path))
    assert whole["optimiser"]["param_groups"] == again["optimiser"]["param_groups"]


class Spoilt:
    """Batches whose states are not numbers from a step on."""

    def __init__(self, source: Batches, first: int) -> None:
        self._source, self._first = source, first

    def steps(self, start: int, stride: int = 1) -> Iterator[Batch]:
        for step, batch in enumerate(self._source.steps(start, stride), start):
            if step >= self._first:
                batch.parts["states"].fill_(torch.nan)
            yield batch

    def held_out(self, tokens: int) -> Iterator[Batch]:
        return self._source.held_out(tokens)


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_kept(
    target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    task = make_task(target, corpus, tmp_path / "planted")
    batches = Batches([corpus], BatchConfig(length=64, tokens=512))
    config = LoopConfig(30, log_every=1000, keep_every=5)
    with pytest.raises(
        TrainingError, match=r"not finite at step .* checkpoint is whole.* lower --rate"
    ):
        train(task, Spoilt(batches, 12), config, Host(tmp_path, lambda record: None))
    assert torch.load(tmp_path / FILE, weights_only=True)["step"] == 10
    again = make_task(target, corpus, tmp_path / "planted")
    train(again, batches, config, Host(tmp_path, lambda record: None))
    assert all(bool(each.isfinite().all()) for each in weights(tmp_path).values())


def test_a_checkpoint_of_another_student_is_refused(
    target: Path, corpus: Corpus, trained: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    other = make_target(tmp_path / "other", seed=6)
    task = make_task(other, corpus, tmp_path / "planted")
    task.module.norm.weight = torch.nn.Parameter(torch.ones(3))
    batches = Batches([corpus], BatchConfig(length=64, tokens=512))
    with pytest.raises(TrainingError, match="of another student"):
        train(task, batches, LoopConfig(1), Host(trained[0], lambda record: None))


def test_losses_are_not_read_at_every_step(
    target: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a number waits for the device that computes it."""
    reads = 0
    for name in ("item", "__float__", "__bool__", "tolist"):
        plain = getattr(Tensor, name)

        def counted(self: Tensor, plain: object = plain) -> object:
            nonlocal reads
            reads += self.requires_grad or self.grad_fn is not None or self.dim() == 0
            return plain(self)  # type: ignore[operator]

        monkeypatch.setattr(Tensor, name, counted)
    task = make_task(target, corpus, tmp_path / "planted")
    batches = Batches([corpus], BatchConfig(length=64, tokens=512))
    seen = []
    for steps in (20, 40):
        reads = 0
        config = LoopConfig(steps, log_every=1000, look_every=1000, keep_every=1000)
        train(task, batches, config, Host(tmp_path / str(steps), lambda record: None))
        seen.append(reads)
    assert seen[1] - seen[0] < 5, "twenty steps more, and hardly a read more"


def test_batches_are_a_function_of_the_step(corpus: Corpus) -> None:
    config = BatchConfig(length=40, tokens=256, seed=3)
    batches = Batches([corpus], config)
    first = [batch.tokens for batch, _ in zip(batches.steps(0), range(90), strict=False)]
    for start in (1, 17, 60):
        again = next(iter(Batches([corpus], config).steps(start)))
        assert torch.equal(again.tokens, first[start])
    other = next(iter(Batches([corpus], BatchConfig(length=40, tokens=256, seed=4)).steps(0)))
    assert other.tokens.shape != first[0].shape or not torch.equal(other.tokens, first[0])


def test_an_epoch_has_every_piece_once_and_nothing_held_out(corpus: Corpus) -> None:
    batches = Batches([corpus], BatchConfig(length=40, tokens=256, held_out=0.2))
    held = [row for batch in batches.held_out(1 << 30) for row in rows(batch)]
    trained: list[tuple[int, ...]] = []
    size = 0
    for batch in batches.steps(0):
        assert batch.tokens.numel() <= 256
        assert not bool(batch.parts["states"][~batch.real].any())
        trained += rows(batch)
        size += int(batch.real.sum())
        if size >= batches.tokens:
            break
    assert size == batches.tokens
    whole = [corpus.tokens(span) for span in corpus.documents]
    pieces = [tuple(t[i : i + 40].tolist()) for t in whole for i in range(0, len(t), 40)]
    assert sorted(held + trained) == sorted(piece for piece in pieces if len(piece) >= 16)


def rows(batch: Batch) -> list[tuple[int, ...]]:
    return [
        tuple(tokens[real].tolist()) for tokens, real in zip(batch.tokens, batch.real, strict=True)
    ]


def test_corpora_of_different_kinds_do_not_mix(
    target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    other = write_corpus(target, tmp_path, 4, Kept(top=4))
    with pytest.raises(Exception, match="keep different things"):
        Batches([corpus, other], BatchConfig(length=40, tokens=256))


def test_best_tokens_alone_teach_too(target: Path, tmp_path: Path) -> None:
    corpus = write_corpus(target, tmp_path / "corpus", 100, Kept(top=8))
    _, records = run(target, corpus, tmp_path / "out", 20)
    losses = [record.values["loss"] for record in records if "loss" in record.values]
    assert losses[-1] < losses[0] and np.isfinite(losses).all()
