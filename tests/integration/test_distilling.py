"""From a target's folder to a student that is served, by the commands alone."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter_workers.methods.student import DistillConfig
from drafter_workers.training.batches import BatchConfig
from drafter_workers.training.corpus import Corpus, CorpusError
from drafter_workers.training.errors import TrainingError
from drafter_workers.training.loop import LoopConfig, Record
from drafter_workers.training.overlap import words
from services.capturing import CaptureJob, capture
from services.config import Config, DrafterConfig, LimitsConfig, ModelConfig, ServerConfig
from services.distilling import DistillJob, distill, spread
from services.errors import ConfigError
from services.launch import prepare
from services.tokenizer import load_tokenizer
from tests.tiny import make_tiny_llama
from tests.unit.services.tiny_folder import VOCAB_SIZE, byte_level_folder

BATCHES = BatchConfig(length=96, tokens=384)
LOOP = LoopConfig(6, log_every=2, look_every=3, keep_every=2)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = byte_level_folder(tmp_path_factory.mktemp("target"))
    return make_tiny_llama(folder, 1, vocab=VOCAB_SIZE, layers=3)


@pytest.fixture(scope="module")
def corpus(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    job = CaptureJob(str(target), folder, 4000, dtype="fp32", batch=16, max_length=96)
    capture(job, lambda line: None, lambda stage, done, total: None)
    return folder


@pytest.fixture
def job(target: Path, corpus: Path, tmp_path: Path) -> DistillJob:
    return DistillJob(
        str(target),
        tmp_path / "student",
        (corpus,),
        layers=(0, 2),
        draft_vocab=64,
        batches=BATCHES,
        loop=LOOP,
    )


def run(job: DistillJob) -> list[Record]:
    records: list[Record] = []
    distill(job, lambda line: None, records.append)
    return records


def test_a_student_is_made_and_can_be_served(job: DistillJob, target: Path) -> None:
    records = run(replace(job, int8=True))
    assert [record.step for record in records if "loss" in record.values] == [2, 4, 6]
    assert {path.name for path in job.out.glob("*.*")} >= {
        "config.json", "model.safetensors", "README.md", "curves.png", "log.jsonl"
    }  # fmt: skip
    assert (job.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "accepted_length" in (job.out / "README.md").read_text()
    prepare(
        Config(
            model=ModelConfig(path=str(target)),
            drafter=(DrafterConfig(path=str(job.out)),),
            limits=LimitsConfig(max_sequences=2, max_context=200),
            server=ServerConfig(grpc="127.0.0.1:0", health="127.0.0.1:0", http="", metrics=""),
        )
    )
    assert run(replace(job, int8=True)) == [], "it is done"


def test_a_folder_keeps_to_its_job(job: DistillJob) -> None:
    run(job)
    with pytest.raises(ConfigError, match="another draft_vocab"):
        run(replace(job, draft_vocab=65))
    with pytest.raises(ConfigError, match="another loop"):
        run(replace(job, loop=replace(LOOP, rate=1.0)))


def test_more_teachers_features_and_own_answers(job: DistillJob, target: Path) -> None:
    loss = DistillConfig(temperature=2.0, hard=0.2, features=0.5)
    run(replace(job, loss=loss, on_policy=0.5))
    run(replace(job, out=job.out / "two", teachers=(str(target),)))
    run(replace(job, out=job.out / "online", online=True))


def test_what_cannot_be_learnt_from_is_refused(job: DistillJob, tmp_path: Path) -> None:
    other = make_tiny_llama(byte_level_folder(_made(tmp_path / "other")), 2, vocab=VOCAB_SIZE)
    with pytest.raises(CorpusError, match="written by another model"):
        run(replace(job, target=str(other)))
    with pytest.raises(CorpusError, match="holds no corpus"):
        run(replace(job, out=tmp_path / "a", data=(tmp_path,)))
    with pytest.raises(ConfigError, match="--online learns from the target alone"):
        run(replace(job, out=tmp_path / "b", online=True, on_policy=0.5))
    kept_out = tmp_path / "kept-out.jsonl"
    kept_out.write_text(json.dumps({"prompt": _some_words(job)}) + "\n")
    with pytest.raises(CorpusError, match="kept out of training"):
        run(replace(job, out=tmp_path / "c", kept_out=(kept_out,)))


def test_features_of_averaged_teachers_are_refused(job: DistillJob) -> None:
    with pytest.raises(TrainingError, match="features"):
        run(replace(job, teachers=(job.target,), loss=DistillConfig(features=1.0)))


@pytest.mark.parametrize(
    ("layers", "count", "expected"), [(30, 4, (0, 1, 28, 29)), (3, 2, (0, 2)), (1, 4, (0,))]
)
def test_a_student_starts_from_both_ends(
    layers: int, count: int, expected: tuple[int, ...]
) -> None:
    assert spread(layers, count) == expected


@pytest.mark.long
@pytest.mark.ray
def test_two_workers_train_one_student(job: DistillJob, tmp_path: Path) -> None:
    """Two workers with a batch each take the step of one with both batches' mean gradient."""
    run(replace(job, workers=2, out=tmp_path / "two"))
    together = torch.load(tmp_path / "two" / "checkpoint.pt", weights_only=True)
    assert together["step"] == LOOP.steps
    assert (tmp_path / "two" / "README.md").is_file()
    run(replace(job, out=tmp_path / "one"))
    alone = torch.load(tmp_path / "one" / "checkpoint.pt", weights_only=True)
    assert any(
        not torch.equal(tensor, alone["trained"][name])
        for name, tensor in together["trained"].items()
    )


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _some_words(job: DistillJob) -> str:
    """A short prompt that appears in what the target wrote."""
    corpus, tokenizer = Corpus(job.data[0]), load_tokenizer(Path(job.target))
    texts = (tokenizer.decode(corpus.tokens(span).tolist()) for span in corpus.documents)
    return next(" ".join(words(text)[:3]) for text in texts if len(words(text)) > 3)
