"""Where soft labels come from: kept, asked anew, averaged; and batches the student writes."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafter_workers.methods.online import OnlineTask
from drafter_workers.methods.student import DistillConfig, StudentTask
from drafter_workers.training.batches import Batch, BatchConfig, Batches
from drafter_workers.training.checkpoints import FILE
from drafter_workers.training.corpus import Corpus, Kept
from drafter_workers.training.loop import Host, LoopConfig, Record, Source, train
from drafter_workers.training.on_policy import OnPolicy, OnPolicyConfig
from drafter_workers.training.teachers import (
    Asked,
    Ensemble,
    KeptOrAsked,
    KeptTop,
    Taught,
    Teacher,
    ask,
    kept_teacher,
    run_rows,
)
from target_workers.model.config import ModelConfig
from target_workers.model.decoder import TorchDecoder
from target_workers.model.loading import load_reference
from tests.tiny import make_tiny
from tests.tiny_engines import prefill
from tests.tiny_training import END, VOCAB, make_target, make_task, write_corpus

IDS = tuple(range(0, VOCAB, 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpus(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    kept = Kept(state_size=64, top=VOCAB)
    return write_corpus(target, tmp_path_factory.mktemp("corpus"), 60, kept)


@pytest.fixture
def batch(corpus: Corpus) -> Batch:
    return next(Batches([corpus], BatchConfig(length=64, tokens=512)).steps(0))


def picked(batch: Batch) -> Tensor:
    """Rows whose next token is in the same row."""
    after = torch.cat((batch.real[:, 1:], torch.zeros_like(batch.real[:, :1])), 1)
    return (batch.real & after).flatten()


def kept(target: Path, origin_kept: Kept, corpus: Corpus, ids: tuple[int, ...]) -> Teacher:
    teacher = kept_teacher(target, replace(corpus.origin, kept=origin_kept), ids)
    assert teacher is not None
    return teacher


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 1}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 7}),
        ("Mistral", {"sliding_window": 1}),
    ],
)
def test_attention_without_a_cache_is_that_with_one(
    family: str, fields: dict[str, int], tmp_path: Path
) -> None:
    decoder = load_reference(make_tiny(tmp_path, 2, family, **fields), dtype=torch.float32)
    tokens = torch.randint(512, (3, 20), generator=torch.Generator().manual_seed(1))
    together = run_rows(decoder, tokens).view(3, 20, -1)
    for row, each in zip(tokens, together, strict=True):
        _, alone = prefill(decoder, row.tolist())
        assert (decoder.logits(each.detach()) - alone).abs().max() < 1e-4


def test_what_was_kept_is_what_the_target_says_when_asked(
    target: Path, corpus: Corpus, batch: Batch
) -> None:
    asked = Asked(load_reference(target, dtype=torch.float32), IDS)
    rows = picked(batch)
    fresh = asked.teach(batch, rows)
    for way in (Kept(state_size=64), Kept(top=VOCAB)):
        teacher = kept(target, way, corpus, IDS)
        told = teacher.teach(batch, rows)
        apart = told.logits.float().softmax(-1) - fresh.logits.float().softmax(-1)
        assert float(apart.abs().max()) < 0.02, way
        agrees = (teacher.best(batch, rows) == asked.best(batch, rows)).float().mean()
        assert float(agrees) > 0.97, way


def test_few_best_tokens_leave_the_rest_to_all_others(target: Path, tmp_path: Path) -> None:
    corpus = write_corpus(target, tmp_path, 20, Kept(top=8))
    batch = next(Batches([corpus], BatchConfig(length=64, tokens=512)).steps(0))
    rows, every = picked(batch), tuple(range(VOCAB))
    told = kept(target, Kept(top=8), corpus, every).teach(batch, rows).logits.softmax(-1)
    asked = Asked(load_reference(target, dtype=torch.float32), every).teach(batch, rows)
    true = asked.logits.float().softmax(-1)
    best = true.topk(8).indices
    assert float((told.gather(1, best) - true.gather(1, best)).abs().max()) < 0.06
    assert torch.allclose(told.sum(-1), torch.ones(len(told)), atol=1e-5)


def of_top(logits: Tensor, top: int) -> Batch:
    """One row of what `Kept(top)` keeps of these logits [t, vocab]."""
    best = logits.topk(top)
    row = torch.zeros(1, len(logits))
    parts = {
        "top_ids": best.indices.int()[None],
        "top_logits": best.values.half()[None],
        "log_sums": logits.logsumexp(-1)[None],
    }
    return Batch(row.long(), row == 0, row == 0, parts)


@pytest.mark.parametrize("height", [0.0, 200.0, -200.0])
@pytest.mark.parametrize("top", [4, VOCAB])
def test_best_tokens_of_logits_of_any_height_keep_their_chances(height: float, top: int) -> None:
    logits = 2 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2)) + height
    told = KeptTop(VOCAB, torch.arange(VOCAB)).teach(of_top(logits, top), torch.ones(6).bool())
    true, got = logits.double().softmax(-1), told.logits.double().softmax(-1)
    best = true.topk(top).indices
    assert bool(told.logits.isfinite().all())
    # Half a step of half precision at 200 is 0.0625 of a logit.
    torch.testing.assert_close(got.gather(1, best), true.gather(1, best), rtol=0.13, atol=1e-5)
    rest = got.clone().scatter_(1, best, 0).sum(-1)
    assert float((rest - (1 - true.gather(1, best).sum(-1))).abs().max()) < 0.1


def test_what_was_not_kept_is_shared_evenly_by_all_others() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4)).half().float()
    told = KeptTop(VOCAB, torch.arange(VOCAB)).teach(of_top(logits, 4), torch.ones(6).bool())
    expected = logits.double().softmax(-1)
    is_best = torch.zeros_like(expected).scatter(1, logits.topk(4).indices, 1).bool()
    left = 1 - expected.where(is_best, 0).sum(-1, keepdim=True)
    expected = expected.where(is_best, left / (VOCAB - 4))
    torch.testing.assert_close(told.logits.double().softmax(-1), expected, rtol=1e-4, atol=1e-6)


class Says:
    """A teacher that says one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def teach(self, batch: Batch, picked: Tensor) -> Taught:
        return Taught(torch.full((int(picked.sum()), VOCAB), self.number))

    def best(self, batch: Batch, picked: Tensor) -> Tensor:
        return torch.full((int(picked.sum()),), int(self.number))


def test_what_was_kept_is_asked_for_only_where_it_is_there(batch: Batch) -> None:
    rows, bare = picked(batch), replace(batch, parts={})
    both = KeptOrAsked(Says(1), Says(2))
    for of, expected in ((batch, 1.0), (bare, 2.0)):
        assert bool((both.teach(of, rows).logits == expected).all())
        assert bool((both.best(of, rows) == int(expected)).all())
    assert bool((KeptOrAsked(None, Says(2)).best(batch, rows) == 2).all())


def test_an_ensemble_is_the_mean_of_what_each_holds_likely(
    target: Path, corpus: Corpus, batch: Batch, tmp_path: Path
) -> None:
    one = kept(target, Kept(state_size=64), corpus, IDS)
    two = Asked(load_reference(make_target(tmp_path, 9), dtype=torch.float32), IDS)
    rows = picked(batch)
    mean = sum(t.teach(batch, rows).logits.float().softmax(-1) for t in (one, two)) / 2
    both = Ensemble([one, two])
    assert torch.allclose(both.teach(batch, rows).logits.exp(), mean, atol=1e-6)
    assert torch.equal(both.best(batch, rows), one.best(batch, rows))


def student_of(target: Path, corpus: Corpus, folder: Path) -> tuple[StudentTask, TorchDecoder]:
    task = make_task(target, corpus, folder)
    assert isinstance(task.module, TorchDecoder)
    return task, task.module


def test_a_student_answers_some_batches_itself(
    target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    _, student = student_of(target, corpus, tmp_path)
    ids = tuple(range(VOCAB))
    batches = Batches([corpus], BatchConfig(length=64, tokens=512))
    config = OnPolicyConfig(0.5, frozenset({END}), tokens=5, length=64)
    source = OnPolicy(batches, student, ids, config)
    first = list(islice(source.steps(0), 12))
    own = [step for step, batch in enumerate(first) if not batch.parts]
    assert 0 < len(own) < 12
    again = list(islice(source.steps(own[0]), 2))
    assert torch.equal(again[0].tokens, first[own[0]].tokens)
    plain = next(iter(batches.steps(own[0])))
    third = list(islice(source.steps(1, 3), 4))
    assert [not batch.parts for batch in third] == [step in own for step in (1, 4, 7, 10)]
    rows = zip(plain.tokens, plain.answers, strict=True)
    asked = {tuple(tokens[: answers.int().argmax()].tolist()) for tokens, answers in rows}
    anew = first[own[0]]
    for tokens, answers, real in zip(anew.tokens, anew.answers, anew.real, strict=True):
        start = int(answers.int().argmax())
        assert tuple(tokens[:start].tolist()) in asked
        assert 1 <= int(real.sum()) - start <= 5
    asking = KeptOrAsked(kept(target, Kept(state_size=64), corpus, ids), ask(target, ids))
    for batch in first[:4]:
        assert asking.teach(batch, picked(batch)).logits.shape[1] == VOCAB


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_so_many_batches_are_its_own(
    target: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(OnPolicy, "_answer", lambda self, batch, seed: replace(batch, parts={}))
    _, student = student_of(target, corpus, tmp_path)
    batches = Batches([corpus], BatchConfig(length=64, tokens=512))
    source = OnPolicy(
        batches, student, tuple(range(VOCAB)), OnPolicyConfig(share, frozenset({END}))
    )
    own = sum(not batch.parts for batch in islice(source.steps(0), 200))
    assert own == pytest.approx(200 * share, abs=100 * share * (1 - share))


def test_a_student_that_writes_goes_on_as_if_nothing_had_happened(
    target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    ids = tuple(range(VOCAB))
    batches = Batches([corpus], BatchConfig(length=64, tokens=512))
    config = OnPolicyConfig(0.5, frozenset({END}), tokens=5, length=64)

    def ended(folder: Path, *, first_stop: int) -> dict[str, Tensor]:
        for steps in (first_stop, 8):
            _, student = student_of(target, corpus, folder / "planted")
            asking = KeptOrAsked(kept(target, Kept(state_size=64), corpus, ids), ask(target, ids))
            task = StudentTask(student, ids, asking, DistillConfig())
            source = OnPolicy(batches, student, ids, config)
            loop = LoopConfig(8, rate=5e-3, warm_up=5, keep_every=1, look_every=100)
            with suppress(StopHere):
                train(task, Stopping(source, steps), loop, Host(folder, lambda record: None))
        state: dict[str, Tensor] = torch.load(folder / FILE, weights_only=True)["trained"]
        return state

    whole, parts = (ended(tmp_path / name, first_stop=at) for name, at in (("a", 8), ("b", 5)))
    assert all(torch.equal(each, parts[name]) for name, each in whole.items())


class StopHere(Exception): ...


class Stopping:
    """Batches up to a step, where the run is interrupted."""

    def __init__(self, source: Source, end: int) -> None:
        self._source, self._end = source, end

    def steps(self, start: int, stride: int = 1) -> Iterator[Batch]:
        yield from islice(self._source.steps(start, stride), self._end - start)
        raise StopHere

    def held_out(self, tokens: int) -> Iterator[Batch]:
        return self._source.held_out(tokens)


def test_an_online_teacher_learns_with_its_student(
    target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    student = make_task(target, corpus, tmp_path / "planted").module
    assert isinstance(student, TorchDecoder)
    ids = range(ModelConfig.from_folder(target).vocab_size)
    teacher = Asked(load_reference(target, dtype=torch.float32), ids)
    before = teacher.decoder.norm.weight.detach().clone()
    task = OnlineTask(StudentTask(student, ids, teacher, DistillConfig()), teacher)
    records: list[Record] = []
    batches = Batches([corpus], BatchConfig(length=64, tokens=512))
    config = LoopConfig(30, rate=5e-3, warm_up=5, log_every=5)
    train(task, batches, config, Host(tmp_path, records.append))
    logs = [record.values["teacher"] for record in records if "teacher" in record.values]
    looks = [record.values["agreement"] for record in records if "agreement" in record.values]
    assert logs[-1] < logs[0] and looks[-1] > looks[0]
    assert not torch.equal(before, teacher.decoder.norm.weight)
