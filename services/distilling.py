"""`paceline train distill`: makes a student of a target from a corpus the target wrote."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from drafter_workers.methods.online import OnlineTask
from drafter_workers.methods.student import DistillConfig, StudentTask
from drafter_workers.planting import plant, planted_config
from drafter_workers.student import Borrowed, save_student
from drafter_workers.training.batches import BatchConfig, Batches
from drafter_workers.training.corpus import Corpus, CorpusError
from drafter_workers.training.loop import (
    Alone,
    Host,
    LoopConfig,
    Record,
    Source,
    Task,
    Workers,
    train,
)
from drafter_workers.training.on_policy import OnPolicy, OnPolicyConfig
from drafter_workers.training.overlap import KeptOut
from drafter_workers.training.teachers import (
    Asked,
    Ensemble,
    KeptOrAsked,
    Teacher,
    ask,
    kept_teacher,
)
from drafter_workers.training.vocabulary import most_used
from services.errors import ConfigError
from services.prompts import kept_out_texts
from services.pull import resolve
from services.tokenizer import Tokenizer, load_tokenizer
from services.training_report import card
from target_workers.model.config import ModelConfig, read_config
from target_workers.model.decoder import TorchDecoder
from target_workers.model.files import ends_hash, model_hash
from target_workers.model.loading import DTYPES, Part, load_reference

Say = Callable[[str], object]
Told = Callable[[Record], object]
PLANTED, LOG, JOB = "planted", "log.jsonl", "job.json"


@dataclass(frozen=True, slots=True)
class DistillJob:
    """Which student to make of which target, from what, and where to.

    `layers` of the target are what it starts as (none: the first two and the last two);
    `draft_vocab` tokens it can propose (0: all). `teachers` are models beside the target, averaged
    with it; with `online` the target itself learns the corpus meanwhile.
    """

    target: str
    out: Path
    data: tuple[Path, ...]
    layers: tuple[int, ...] = ()
    draft_vocab: int = 8192
    int8: bool = False
    kept_out: tuple[Path, ...] = ()
    workers: int = 1
    teachers: tuple[str, ...] = ()
    online: bool = False
    on_policy: float = 0.0
    loss: DistillConfig = field(default_factory=DistillConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(1000))


def distill(job: DistillJob, say: Say, told: Told) -> None:
    """Train and export; goes on where an interrupted run of the same job stopped.

    Raises ConfigError, CorpusError, ModelError or TrainingError.
    """
    _claim(job)
    if job.workers > 1:
        from drafter_workers.training.many import train_many

        train_many(partial(_train, job, print, print), job.workers, on_gpus=False)
    else:
        _train(job, say, told, Alone())
    say(f"the student is in {job.out}")


def _claim(job: DistillJob) -> None:
    """Write down what is made in the folder. Raises ConfigError if that is something else."""
    asked = json.loads(json.dumps(asdict(job) | {"workers": 1}, default=str))
    path = job.out / JOB
    job.out.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.is_file() else asked
    different = [name for name in asked if known.get(name) != asked[name]]
    if different:
        raise ConfigError(
            f"{job.out} holds a run with another {', '.join(different)}; give another folder, or "
            "the same options to go on with it"
        )
    path.write_text(json.dumps(asked, indent=1) + "\n")


def _train(job: DistillJob, say: Say, told: Told, workers: Workers) -> None:
    folder = resolve(job.target)
    config, tokenizer = ModelConfig.from_folder(folder), load_tokenizer(folder)
    corpora = _corpora(job, tokenizer, model_hash(folder))
    batches = Batches(corpora, job.batches)
    say(f"{batches.tokens} tokens an epoch")
    layers = job.layers or spread(config.num_layers, 4)
    ends = frozenset({*tokenizer.eos_ids, *config.eos_tokens})
    ids = most_used(corpora, job.draft_vocab, ends) if job.draft_vocab else None
    borrowed = Borrowed(ends_hash(folder), ids)
    planted = job.out / PLANTED / str(workers.rank)
    plant(folder, planted, layers, borrowed)
    student = load_reference(planted, dtype=DTYPES["fp32"], part=Part(loan=borrowed.loan(folder)))
    known = ids or tuple(range(config.vocab_size))
    task = _task(job, folder, corpora, student, known)
    source: Source = batches
    if job.on_policy:
        policy = OnPolicyConfig(
            job.on_policy, ends, length=job.batches.length, seed=job.batches.seed
        )
        source = OnPolicy(batches, student, known, policy)
    records = _records(job.out / LOG)
    with (job.out / LOG).open("a") as log:

        def tell(record: Record) -> None:
            records.append(record)
            told(record)
            if workers.rank == 0:
                log.write(json.dumps(asdict(record)) + "\n")
                log.flush()

        train(task, source, job.loop, Host(job.out, tell, workers))
    if workers.rank == 0:
        shape = planted_config(read_config(folder), layers)
        save_student(job.out, student, shape, borrowed, int8=job.int8)
        card(job.out, asdict(job), sum(corpus.size for corpus in corpora), records)


def _corpora(job: DistillJob, tokenizer: Tokenizer, target_hash: str) -> list[Corpus]:
    """What to train on, of this target, and of nothing that is kept out. Raises CorpusError."""
    kept_out = KeptOut(kept_out_texts(job.kept_out))
    corpora = [Corpus(path) for path in job.data]
    for path, corpus in zip(job.data, corpora, strict=True):
        if corpus.origin.target_hash != target_hash:
            raise CorpusError(f"{path} was written by another model than the target; capture anew")
        for span in corpus.documents:
            shared = kept_out.overlap(tokenizer.decode(corpus.tokens(span).tolist()))
            if shared:
                raise CorpusError(
                    f"{path} holds words of a prompt that is kept out of training ({shared!r}); "
                    "capture it anew with --keep-out"
                )
    return corpora


def _task(
    job: DistillJob,
    folder: Path,
    corpora: Sequence[Corpus],
    student: TorchDecoder,
    ids: Sequence[int],
) -> Task:
    """The student with its teachers. Raises ModelError or ConfigError."""
    if job.online:
        if job.teachers or job.on_policy:
            raise ConfigError(
                "--online learns from the target alone; leave out --teacher and --on-policy"
            )
        target = Asked(load_reference(folder, dtype=DTYPES["fp32"]), ids)
        return OnlineTask(StudentTask(student, ids, target, job.loss), target)
    teacher: Teacher | None = kept_teacher(folder, corpora[0].origin, ids)
    if teacher is None or job.on_policy:
        teacher = KeptOrAsked(teacher, ask(folder, ids))
    if job.teachers:
        others = [ask(resolve(path), ids) for path in job.teachers]
        teacher = Ensemble([teacher, *others])
    return StudentTask(student, ids, teacher, job.loss)


def _records(path: Path) -> list[Record]:
    """What an interrupted run told before."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [Record(**json.loads(line)) for line in lines]


def spread(layers: int, count: int) -> tuple[int, ...]:
    """The first layers and the last ones: what a shallow student starts from."""
    count = min(count, layers)
    first = (count + 1) // 2
    return (*range(first), *range(layers - (count - first), layers))
