"""A tiny target, a corpus it wrote, and a student to train: everything real but the size."""

import os
import signal
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from drafter_workers.methods.student import DistillConfig, StudentTask
from drafter_workers.planting import plant
from drafter_workers.student import Borrowed
from drafter_workers.training.batches import Batch, BatchConfig, Batches
from drafter_workers.training.capture import Capture, CaptureConfig
from drafter_workers.training.corpus import Corpus, Kept, Origin
from drafter_workers.training.corpus_writer import CorpusWriter
from drafter_workers.training.loop import Host, LoopConfig, Record, Source, train
from drafter_workers.training.plans import Frame, Style, self_written
from drafter_workers.training.teachers import kept_teacher
from target_workers.model.config import ModelConfig
from target_workers.model.files import ends_hash, model_hash
from target_workers.model.loading import Part, load_decoder, load_reference
from tests.tiny import make_tiny

VOCAB = 64
END = 2
FRAME = Frame((3, 4), (END, 5), (END, 6))
STYLE = Style(question_tokens=6, answer_tokens=24, answer_temperatures=(0.0, 0.5))


def make_target(folder: Path, seed: int = 5) -> Path:
    """A random Llama of three layers over few tokens; its last two do little, so that a student
    of one can learn to agree with it."""
    return make_tiny(folder, seed, "Llama", vocab_size=VOCAB, num_hidden_layers=3)


def write_corpus(target: Path, folder: Path, documents: int, kept: Kept | None = None) -> Corpus:
    """So many conversations of the target with itself."""
    kept = Kept(state_size=64) if kept is None else kept
    writer = CorpusWriter(folder, Origin(model_hash(target), VOCAB, 0, "self-written", kept))
    decoder = load_decoder(target, dtype=torch.float32)
    config = CaptureConfig(VOCAB, frozenset({END}), batch=16, max_length=64, kept=kept)
    plans = islice(self_written(FRAME, [], STYLE, 0), documents)
    Capture(decoder, config, torch.float32).run(plans, writer.add)
    writer.flush()
    return Corpus(folder)


def make_task(
    target: Path, corpus: Corpus, folder: Path, config: DistillConfig | None = None
) -> StudentTask:
    """A student of the target's first layer, taught by what the corpus kept."""
    plant(target, folder, (0,), Borrowed(ends_hash(target)))
    borrowed = Borrowed(ends_hash(target)).loan(target)
    student = load_reference(folder, dtype=torch.float32, part=Part(loan=borrowed))
    ids = range(ModelConfig.from_folder(target).vocab_size)
    teacher = kept_teacher(target, corpus.origin, ids)
    assert teacher is not None
    return StudentTask(student, ids, teacher, config or DistillConfig())


class Killed:
    """Batches that end their process, as a kill does, where one is asked for."""

    def __init__(self, source: Source, step: int) -> None:
        self._source, self._step = source, step

    def steps(self, start: int, stride: int = 1) -> Iterator[Batch]:
        for step, batch in enumerate(self._source.steps(start, stride), start):
            if step == self._step:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    def held_out(self, tokens: int) -> Iterator[Batch]:
        return self._source.held_out(tokens)


def run(
    target: Path, corpus: Corpus, folder: Path, steps: int, killed_at: int = -1
) -> tuple[StudentTask, list[Record]]:
    """Train in a folder, or go on there."""
    task = make_task(target, corpus, folder / "planted")
    batches = Batches([corpus], BatchConfig(length=64, tokens=512, held_out=0.1))
    records: list[Record] = []
    loop = LoopConfig(steps, rate=5e-3, warm_up=5, log_every=5, look_every=20, keep_every=5)
    train(task, Killed(batches, killed_at), loop, Host(folder, records.append))
    return task, records


if __name__ == "__main__":
    torch.set_num_threads(1)
    target_folder, corpus_folder, out = map(Path, sys.argv[1:4])
    run(target_folder, Corpus(corpus_folder), out, int(sys.argv[4]), int(sys.argv[5]))
