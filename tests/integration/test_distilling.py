"""From a target's folder to a student that is served, by the commands alone."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError
from torch import Tensor

from drafter_workers.methods.student import DistillConfig, StudentTask
from drafter_workers.training.batches import Batch, BatchConfig, Batches
from drafter_workers.training.corpus import Corpus, CorpusError
from drafter_workers.training.errors import TrainingError
from drafter_workers.training.loop import LoopConfig, Record
from drafter_workers.training.overlap import words
from services import distilling
from services.capturing import CaptureJob, capture
from services.config import Config, DrafterConfig, LimitsConfig, ModelConfig, ServerConfig
from services.distilling import DistillJob, distill, spread
from services.errors import ConfigError
from services.launch import prepare
from services.tokenizer import load_tokenizer
from target_workers.model.config import ModelError
from tests.tiny import make_tiny_llama
from tests.unit.services.tiny_folder import (
    VOCAB_SIZE,
    byte_level_folder,
    sentencepiece_folder,
)

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


def test_a_folder_keeps_to_its_job(job: DistillJob, corpus: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(corpus, tmp_path / "copied"))
    job = replace(job, data=(copied,))
    run(job)
    with pytest.raises(TrainingError, match="another draft_vocab"):
        run(replace(job, draft_vocab=65))
    with pytest.raises(TrainingError, match=r"another loop\.steps"):
        run(replace(job, loop=replace(LOOP, steps=7)))
    shutil.copy(copied / "shard-00000.safetensors", copied / "shard-00001.safetensors")
    with pytest.raises(TrainingError, match="another corpus_tokens"):
        run(job)


def test_a_student_that_is_made_is_left_alone(job: DistillJob) -> None:
    run(job)
    before = {path: path.stat().st_mtime_ns for path in job.out.glob("[c-z]*") if path.is_file()}
    (job.out / "README.md").write_text("my own words")
    assert run(job) == []
    assert (job.out / "README.md").read_text() == "my own words"
    for name in ("config.json", "model.safetensors", "checkpoint.pt", "curves.png"):
        assert (job.out / name).stat().st_mtime_ns == before[job.out / name], name


def test_a_disk_that_is_full_at_any_time_leaves_a_run_to_go_on_with(
    job: DistillJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    for name in ("plant", "save_student", "card"):
        with monkeypatch.context() as patch:
            patch.setattr(distilling, name, full)
            with pytest.raises(
                TrainingError, match=r"No space left .*same command again"
            ) as raised:
                run(job)
        assert str(job.out) in str(raised.value)
    assert run(job) == [], "it was trained"
    assert (job.out / "README.md").is_file()
    modes = {(job.out / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1, "who may read one may read the other"


def test_a_mistaken_option_does_not_claim_the_folder(job: DistillJob) -> None:
    for layers in ((0, 3), (0, 0), (-1,)):
        with pytest.raises(ModelError, match="cannot start from layers"):
            run(replace(job, layers=layers))
    run(job)


def test_an_interrupted_run_goes_on_and_tells_each_step_once(job: DistillJob) -> None:
    class Interrupted(Exception): ...

    def until(record: Record) -> None:
        if record.step == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        distill(job, lambda line: None, until)
    log = job.out / "log.jsonl"
    with log.open("a") as file:
        file.write('{"step": 4, "val')  # a kill in the middle of a line
    run(replace(job, loop=replace(LOOP, rate=1e-4)))  # what a loss that is no number asks for
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["step"] for each in steps if "loss" in each["values"]] == [2, 4, 6]
    assert [each["step"] for each in steps if "agreement" in each["values"]] == [0, 3, 6]
    rates = [each["values"]["rate"] for each in steps if "rate" in each["values"]]
    assert rates[1] < rates[0]


def test_a_folder_of_others_is_left_alone(job: DistillJob, target: Path) -> None:
    before = (target / "config.json").read_text()
    with pytest.raises(TrainingError, match="a model that no run here made"):
        run(replace(job, out=target))
    assert (target / "config.json").read_text() == before
    job.out.mkdir()
    with FileLock(job.out / ".lock"), pytest.raises(TrainingError, match="another run trains in"):
        run(job)


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
    with pytest.raises(ConfigError, match="--length 2048 or less"):
        run(replace(job, batches=BatchConfig(4096, 4096), out=tmp_path / "long"))
    with pytest.raises(ValueError, match="share of own batches"):
        run(replace(job, on_policy=1.5, out=tmp_path / "share"))
    with pytest.raises(CorpusError, match="the same documents"):
        run(replace(job, data=job.data * 2, out=tmp_path / "twice"))
    kept_out = tmp_path / "kept-out.jsonl"
    kept_out.write_text(json.dumps({"prompt": _some_words(job)}) + "\n")
    with pytest.raises(CorpusError, match="kept out of training"):
        run(replace(job, out=tmp_path / "c", kept_out=(kept_out,)))


def test_a_teacher_of_other_tokens_is_refused(job: DistillJob, tmp_path: Path) -> None:
    other = make_tiny_llama(sentencepiece_folder(tmp_path / "other"), 3, vocab=VOCAB_SIZE)
    with pytest.raises(ConfigError, match="has another tokenizer than the target: id 0"):
        run(replace(job, teachers=(str(other),)))
    small = make_tiny_llama(byte_level_folder(_made(tmp_path / "small")), 3, vocab=380)
    with pytest.raises(ConfigError, match="has no logit for token 384"):
        run(replace(job, teachers=(str(small),), draft_vocab=0))


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


class Pairs(Batches):
    """Two batches of a step, the second beside the first."""

    def steps(self, start: int, stride: int = 1) -> Iterator[Batch]:
        mine, others = super().steps(2 * start, 2), super().steps(2 * start + 1, 2)
        for batch, other in zip(mine, others, strict=False):
            yield replace(batch, parts={**batch.parts, "other": other})  # type: ignore[dict-item]


def weights(folder: Path) -> Tensor:
    """All that was trained, in one row."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert state["step"] == LOOP.steps
    return torch.cat([tensor.flatten() for tensor in state["trained"].values()])


class PairTask(StudentTask):
    """Learns from both."""

    def losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        parts = dict(batch.parts)
        other = cast(Batch, parts.pop("other"))
        both = (
            super(PairTask, self).losses(each, step)
            for each in (replace(batch, parts=parts), other)
        )
        return {"loss": torch.stack([each["loss"] for each in both]).mean()}


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_two_workers_train_one_student(
    job: DistillJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the steps of one with the mean gradient of both batches."""
    monkeypatch.chdir(tmp_path)
    job = replace(job, loop=replace(LOOP, rate=1e-2, warm_up=0), out=Path("one"))
    records = run(replace(job, workers=2, out=Path("two")))
    assert [record.step for record in records if "loss" in record.values] == [2, 4, 6]
    assert Path("two/README.md").is_file()
    run(job)
    one, two = weights(job.out), weights(Path("two"))
    monkeypatch.setattr(distilling, "StudentTask", PairTask)
    monkeypatch.setattr(distilling, "Batches", Pairs)
    run(replace(job, out=Path("pairs")))
    pairs = weights(Path("pairs"))
    # Where a gradient is next to nothing, rounding decides which way a weight goes.
    assert float((two - pairs).norm()) < 0.05 * float((one - pairs).norm())


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_what_a_worker_says_reaches_the_user_in_a_line(job: DistillJob) -> None:
    with pytest.raises(TrainingError, match=r"worker \d: .*cannot start from layers") as caught:
        run(replace(job, workers=2, layers=(0, 9)))
    assert "\n" not in str(caught.value)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _some_words(job: DistillJob) -> str:
    """A short prompt that appears in what the target wrote."""
    corpus, tokenizer = Corpus(job.data[0]), load_tokenizer(Path(job.target))
    texts = (tokenizer.decode(corpus.tokens(span).tolist()) for span in corpus.documents)
    return next(" ".join(words(text)[:3]) for text in texts if len(words(text)) > 3)
