"""`paceline train distill`: makes a student of a target from a corpus the target wrote."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from drafter_workers.methods.online import OnlineTask
from drafter_workers.methods.student import DistillConfig, StudentTask
from drafter_workers.planting import plant, planted_config
from drafter_workers.student import Borrowed, save_student
from drafter_workers.training.batches import BatchConfig, Batches
from drafter_workers.training.checkpoints import kept_step
from drafter_workers.training.corpus import Corpus, CorpusError, Origin
from drafter_workers.training.errors import TrainingError
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
from drafter_workers.training.run_folder import (
    alone,
    append,
    claim,
    followed,
    records_until,
    writing,
)
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
from services.prompts import kept_out_texts, text_of
from services.pull import resolve
from services.tokenizer import Tokenizer, load_tokenizer
from services.training_report import CARD, card
from target_workers.model.config import Json, ModelConfig, read_config
from target_workers.model.decoder import TorchDecoder
from target_workers.model.files import SINGLE_FILE, ends_hash, model_hash
from target_workers.model.loading import DTYPES, Part, load_reference

Say = Callable[[str], object]
Told = Callable[[Record], object]
PLANTED = "planted"
# What may change when a run goes on: a lower rate is what a loss that is no number asks for.
FREE = ("out", "workers", "kept_out", "loop.rate")


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
    sizes = [Corpus(path).size for path in job.data]
    with alone(job.out):
        # A corpus that grew would hold out other documents.
        claim(job.out, asdict(job) | {"corpus_tokens": sizes}, FREE)
        if not all((job.out / name).is_file() for name in (SINGLE_FILE, CARD)):
            _run(job, say, told)
    say(f"the student is in {job.out}")


def _run(job: DistillJob, say: Say, told: Told) -> None:
    if job.workers == 1:
        _train(job, say, told, Alone())
        return
    from drafter_workers.training.many import train_many

    # The other processes start in other folders.
    target, *teachers = (str(resolve(path).resolve()) for path in (job.target, *job.teachers))
    data, kept_out = ([each.resolve() for each in paths] for paths in (job.data, job.kept_out))
    placed = replace(
        job,
        target=target,
        teachers=tuple(teachers),
        out=job.out.resolve(),
        data=tuple(data),
        kept_out=tuple(kept_out),
    )
    records_until(job.out, kept_step(job.out))
    with followed(job.out, told):
        train_many(partial(_train, placed, _unheard, _unheard), job.workers, on_gpus=False)


def _unheard(_: object) -> None:
    pass


def _train(job: DistillJob, say: Say, told: Told, workers: Workers) -> None:
    folder = resolve(job.target)
    config, tokenizer = ModelConfig.from_folder(folder), load_tokenizer(folder)
    if job.batches.length > config.max_context:
        raise ConfigError(
            f"pieces of {job.batches.length} tokens are longer than the target's context; give "
            f"--length {config.max_context} or less"
        )
    corpora = _corpora(job, tokenizer, model_hash(folder))
    batches = Batches(corpora, job.batches)
    layers = job.layers or spread(config.num_layers, 4)
    ends = frozenset({*tokenizer.eos_ids, *config.eos_tokens})
    ids = most_used(corpora, job.draft_vocab, ends) if job.draft_vocab else None
    borrowed = Borrowed(ends_hash(folder), ids)
    planted = job.out / PLANTED / str(workers.rank)
    with writing(planted):
        plant(folder, planted, layers, borrowed)
    student = load_reference(planted, dtype=DTYPES["fp32"], part=Part(loan=borrowed.loan(folder)))
    known = ids or tuple(range(config.vocab_size))
    say(
        f"a student of layers {', '.join(map(str, layers))} of {config.num_layers}, with "
        f"{len(known)} tokens to propose; {batches.tokens} tokens an epoch"
    )
    task = _task(job, folder, corpora[0].origin, student, known)
    source: Source = batches
    if job.on_policy:
        policy = OnPolicyConfig(
            job.on_policy, ends, length=job.batches.length, seed=job.batches.seed
        )
        source = OnPolicy(batches, student, known, policy)
    is_first = workers.rank == 0
    records = records_until(job.out, kept_step(job.out)) if is_first else []

    def tell(record: Record) -> None:
        if is_first:
            records.append(record)
            append(job.out, record)
            told(record)

    train(task, source, job.loop, Host(job.out, tell, workers))
    if is_first:
        _export(job, student, planted_config(read_config(folder), layers), borrowed)
        with writing(job.out):
            card(job.out, asdict(job), sum(corpus.size for corpus in corpora), records)


def _export(
    job: DistillJob, student: TorchDecoder, shape: Mapping[str, Json], borrowed: Borrowed
) -> None:
    """What is served. Raises TrainingError if it cannot be written."""
    try:
        save_student(job.out, student, shape, borrowed, int8=job.int8)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"cannot write the student to {job.out} ({error}); make room and run the same command "
            "again: nothing is trained anew"
        ) from error
    shutil.rmtree(job.out / PLANTED, ignore_errors=True)


def _corpora(job: DistillJob, tokenizer: Tokenizer, target_hash: str) -> list[Corpus]:
    """What to train on, of this target, and of nothing that is kept out. Raises CorpusError."""
    kept_out = KeptOut(kept_out_texts(job.kept_out))
    corpora = [Corpus(path) for path in job.data]
    for path, corpus in zip(job.data, corpora, strict=True):
        if corpus.origin.target_hash != target_hash:
            raise CorpusError(f"{path} was written by another model than the target; capture anew")
        for span in corpus.documents:
            shared = kept_out.overlap(text_of(tokenizer, corpus.tokens(span).tolist()))
            if shared:
                raise CorpusError(
                    f"{path} holds words of a prompt that is kept out of training ({shared!r}); "
                    "capture it anew with --keep-out"
                )
    return corpora


def _task(
    job: DistillJob,
    folder: Path,
    origin: Origin,
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
    teacher: Teacher | None = kept_teacher(folder, origin, ids)
    if teacher is None or job.on_policy:
        teacher = KeptOrAsked(teacher, ask(folder, ids))
    if job.teachers:
        teacher = Ensemble([teacher, *_others(job, folder, ids)])
    return StudentTask(student, ids, teacher, job.loss)


def _others(job: DistillJob, folder: Path, ids: Sequence[int]) -> Iterator[Teacher]:
    """The teachers beside the target. Raises ModelError, or ConfigError for other tokens."""
    tokenizer = load_tokenizer(folder)
    for name in job.teachers:
        path = resolve(name)
        if difference := tokenizer.first_difference(load_tokenizer(path)):
            raise ConfigError(
                f"the teacher {name} has another tokenizer than the target: {difference}; leave it "
                "out"
            )
        if max(ids) >= ModelConfig.from_folder(path).vocab_size:
            raise ConfigError(
                f"the teacher {name} has no logit for token {max(ids)}; give --draft-vocab, so "
                "that the student proposes only tokens that are used"
            )
        yield ask(path, ids)


def spread(layers: int, count: int) -> tuple[int, ...]:
    """The first layers and the last ones: what a shallow student starts from."""
    count = min(count, layers)
    first = (count + 1) // 2
    return (*range(first), *range(layers - (count - first), layers))
