"""`paceline capture`: has a target write a corpus to train drafters on."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from drafter_workers.training.capture import HEAD_ROWS, Capture, CaptureConfig, use_threads
from drafter_workers.training.conversation import Plan
from drafter_workers.training.corpus import HEADER, Corpus, Document, Kept, Origin
from drafter_workers.training.corpus_writer import CorpusWriter
from drafter_workers.training.openers import OPENERS
from drafter_workers.training.overlap import KeptOut
from drafter_workers.training.plans import Frame, Ids, Style, answered, self_written
from drafter_workers.training.sieve import Sieve
from services.chat import ChatError
from services.errors import ConfigError
from services.memory_plan import human
from services.preflight import memory_bytes
from services.prompts import kept_out_texts, read_prompts, text_of
from services.pull import resolve
from services.tokenizer import Tokenizer, load_tokenizer
from target_workers.model.config import ModelConfig
from target_workers.model.files import model_hash
from target_workers.model.footprint import Footprint
from target_workers.model.loading import DTYPES, load_decoder

SPARE_BYTES = 64 << 20
SELF_WRITTEN = "self-written"  # the source of a corpus without prompts
Say = Callable[[str], object]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """What to write and where. `data`: prompts to answer (none: the target writes its own)."""

    target: str
    out: Path
    tokens: int
    data: Path | None = None
    kept_out: tuple[Path, ...] = ()
    keep: str = "states"
    top: int = 32
    dtype: str = "bf16"
    batch: int = 64
    max_length: int = 768
    threads: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Work:
    """What a target is made to write: `tokens` of it at most, but for what is begun by then."""

    plans: Iterator[Plan]
    tokens: int
    source: str


def capture(job: CaptureJob, say: Say, progress: Progress) -> int:
    """Write until there are so many tokens, or all prompts are answered; how many there are then.

    Goes on with what an interrupted run left. Raises ConfigError, CorpusError or ModelError.
    """
    if job.threads > (cores := os.cpu_count() or 1):
        raise ConfigError(f"--threads {job.threads} are too many: the machine has {cores} cores")
    folder = resolve(job.target)
    model, tokenizer = ModelConfig.from_folder(folder), load_tokenizer(folder)
    settings = _settings(job, model, tokenizer)
    kept_out = KeptOut(kept_out_texts(job.kept_out))
    work = _work(job, tokenizer, kept_out, settings.max_length)
    _check_memory(model, settings, job.dtype)
    origin = Origin(model_hash(folder), model.vocab_size, job.seed, work.source, settings.kept)
    with _alone(job.out):
        writer = CorpusWriter(job.out, origin)
        _check_disk(job.out, work, settings, writer.tokens, say)
        sieve = Sieve(partial(text_of, tokenizer), kept_out, writer)
        if writer.tokens:
            sieve.remember(Corpus(job.out))

        def show() -> None:
            progress("tokens", min(writer.tokens, work.tokens), work.tokens)

        def done(document: Document) -> None:
            sieve.take(document)
            show()

        target = _target(job, folder, settings, say)
        show()
        try:
            target.run(_wanted(work, writer), done)
        finally:
            writer.flush()
    say(f"{writer.tokens} tokens in {job.out}; left out: {sieve.left_out}")
    return writer.tokens


def _settings(job: CaptureJob, model: ModelConfig, tokenizer: Tokenizer) -> CaptureConfig:
    return CaptureConfig(
        vocab_size=min(model.vocab_size, tokenizer.vocab_size),
        ends=frozenset({*tokenizer.eos_ids, *model.eos_tokens}),
        batch=job.batch,
        max_length=min(job.max_length, model.max_context),
        kept=_kept(job, model),
    )


def _target(job: CaptureJob, folder: Path, settings: CaptureConfig, say: Say) -> Capture:
    """The target, loaded and ready to write."""
    if job.threads:
        use_threads(job.threads)
    dtype = DTYPES[job.dtype]
    decoder = load_decoder(folder, dtype=dtype)
    say("compiling kernels")
    decoder.compile(dtype)
    return Capture(decoder, settings, dtype)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a folder for one capture. Raises ConfigError if another one or a model has it."""
    if (folder / "config.json").is_file() and not (folder / HEADER).is_file():
        raise ConfigError(f"{folder} holds a model; give another folder for the corpus")
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        raise ConfigError(
            f"another capture writes to {folder}; let it finish or end it, or give another folder"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error}; make it writable, or give another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _kept(job: CaptureJob, model: ModelConfig) -> Kept:
    match job.keep:
        case "states":
            return Kept(state_size=model.hidden_size)
        case "top":
            return Kept(top=min(job.top, model.vocab_size))
        case "nothing":
            return Kept()
    raise ConfigError(f"--keep must be states, top or nothing, is {job.keep!r}")


def _work(job: CaptureJob, tokenizer: Tokenizer, kept_out: KeptOut, max_length: int) -> _Work:
    """Raises ConfigError for prompts that are kept out, or too long for a conversation."""
    frame, style = chat_frame(tokenizer), Style()
    if job.data is None:
        openers = [[_plain(tokenizer, text) for text in texts] for texts in OPENERS.values()]
        longest = max(len(opener) for kind in openers for opener in kind)
        shortest = len(frame.before) + longest + 1 + len(frame.answer) + 1
        if max_length < shortest:
            raise ConfigError(
                f"--max-length {max_length} has no room for a question and its answer; give "
                f"{shortest} or more"
            )
        return _Work(self_written(frame, openers, style, job.seed), job.tokens, SELF_WRITTEN)
    prompts = _prompts(job.data, tokenizer, kept_out)
    plans = list(answered(prompts, frame, style, job.seed))
    for plan in plans:
        if len(plan.turns[0].given) >= max_length:
            raise ConfigError(
                f"prompt {plan.number + 1} of {job.data} takes {len(plan.turns[0].given)} tokens "
                f"and leaves no room to answer it in {max_length}; shorten it or give a larger "
                "--max-length, up to the model's context"
            )
    content = hashlib.sha256(job.data.read_bytes()).hexdigest()[:16]
    tokens = min(job.tokens, len(plans) * max_length)
    return _Work(iter(plans), tokens, f"{job.data.name} {content}")


def _prompts(path: Path, tokenizer: Tokenizer, kept_out: KeptOut) -> Sequence[Sequence[Ids]]:
    """The turns of a file's prompts. Raises ConfigError for one that is kept out."""
    prompts = read_prompts(path)
    for number, prompt in enumerate(prompts, 1):
        if shared := next(filter(None, map(kept_out.overlap, prompt.turns)), ""):
            raise ConfigError(
                f"prompt {number} of {path} is kept out of training ({shared!r}); remove it"
            )
    return [[_plain(tokenizer, turn) for turn in prompt.turns] for prompt in prompts]


def chat_frame(tokenizer: Tokenizer) -> Frame:
    """The tokens around what a user says. Raises ConfigError for a model without a template."""
    if tokenizer.template is None:
        raise ConfigError("the model has no chat template; capture needs an instruct model")
    marks = ("\u2402first\u2402", "\u2402second\u2402", "\u2402third\u2402")
    roles = ("user", "assistant", "user")
    try:
        text = tokenizer.template.render(
            [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        )
    except ChatError as error:
        raise ConfigError(f"capture cannot use this model: {error}") from error
    pieces = re.split("|".join(marks), text)
    if len(pieces) != 4 or not pieces[0]:
        raise ConfigError(
            "capture cannot use this model: its chat template does not show every turn once, after "
            "a beginning; capture needs one that does"
        )
    before, _, again, answer = (_plain(tokenizer, piece) for piece in pieces)
    return Frame(before, answer, again)


def _plain(tokenizer: Tokenizer, text: str) -> Ids:
    return tuple(tokenizer.library.encode(text, add_special_tokens=False).ids)


def _wanted(work: _Work, writer: CorpusWriter) -> Iterator[Plan]:
    """Plans that were not written yet, for as long as more tokens are wanted."""
    for plan in work.plans:
        if writer.tokens >= work.tokens:
            return
        if plan.number not in writer.done:
            yield plan


def _check_memory(model: ModelConfig, settings: CaptureConfig, dtype: str) -> None:
    """Raise ConfigError if the machine has no memory for the target and its conversations."""
    shape = Footprint(model, dtype)
    work_bytes = shape.work_bytes(max(HEAD_ROWS, settings.batch), settings.max_length)
    need = shape.weights_bytes + settings.num_slots * shape.kv_bytes + work_bytes
    if need > memory_bytes():
        raise ConfigError(
            f"{settings.batch} conversations of {settings.max_length} tokens take "
            f"{human(need)} of memory, the machine has {human(memory_bytes())}; give a smaller "
            "--batch or --max-length"
        )


def _check_disk(out: Path, work: _Work, settings: CaptureConfig, written: int, say: Say) -> None:
    """Say how much is to be written. Raises ConfigError if there is no room for it."""
    each = settings.kept.token_bytes
    need = max(0, work.tokens - written) * each
    free = shutil.disk_usage(out).free
    say(
        f"{work.tokens} tokens, {written} of them there: {need / 1e6:.0f} MB more in {out} "
        f"({each} bytes each; {free / 1e6:.0f} MB are free)"
    )
    # When there is enough, as many conversations as run at once are still to end.
    need += settings.num_slots * each + SPARE_BYTES
    if need > free:
        raise ConfigError(
            f"{out} has room for {free / 1e6:.0f} MB, {need / 1e6:.0f} are needed; ask for fewer "
            "tokens, keep less (--keep top or nothing), or give another folder"
        )
