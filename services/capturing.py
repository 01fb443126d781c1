"""`paceline capture`: has a target write a corpus to train drafters on."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path

from drafter_workers.training.capture import Capture, CaptureConfig, use_threads
from drafter_workers.training.conversation import Plan
from drafter_workers.training.corpus import (
    Corpus,
    CorpusWriter,
    Document,
    Kept,
    Origin,
)
from drafter_workers.training.openers import OPENERS
from drafter_workers.training.overlap import KeptOut
from drafter_workers.training.plans import Frame, Style, answered, self_written
from services.errors import ConfigError
from services.prompts import Prompt, kept_out_texts, read_prompts
from services.pull import resolve
from services.tokenizer import Tokenizer, load_tokenizer
from target_workers.model.config import ModelConfig
from target_workers.model.files import model_hash
from target_workers.model.loading import DTYPES, load_decoder

SPARE_BYTES = 64 << 20
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


def capture(job: CaptureJob, say: Callable[[str], object], progress: Progress) -> int:
    """Write until there are so many tokens, or all prompts are answered; how many there are then.

    Goes on with what an interrupted run left. Raises ConfigError, CorpusError or ModelError.
    """
    folder = resolve(job.target)
    config, tokenizer = ModelConfig.from_folder(folder), load_tokenizer(folder)
    kept = _kept(job, config)
    origin = Origin(
        model_hash(folder), config.vocab_size, job.seed, str(job.data or "self-written"), kept
    )
    plans = _plans(job, tokenizer)
    writer = CorpusWriter(job.out, origin)
    _check_disk(job, kept, writer.tokens, say)
    settings = CaptureConfig(
        vocab_size=min(config.vocab_size, tokenizer.vocab_size),
        ends=frozenset({*tokenizer.eos_ids, *config.eos_tokens}),
        batch=job.batch,
        max_length=min(job.max_length, config.max_context),
        kept=kept,
    )
    if job.threads:
        use_threads(job.threads)
    dtype = DTYPES[job.dtype]
    decoder = load_decoder(folder, dtype=dtype)
    say("compiling kernels")
    decoder.compile(dtype)
    sieve = _Sieve(tokenizer, KeptOut(kept_out_texts(job.kept_out)), writer)
    if writer.tokens:
        sieve.remember(Corpus(job.out))

    def done(document: Document) -> None:
        sieve.take(document)
        progress("tokens", min(writer.tokens, job.tokens), job.tokens)

    todo = filterfalse(lambda plan: plan.number in writer.done, plans)
    try:
        Capture(decoder, settings, dtype).run(_until(todo, writer, job.tokens), done)
    finally:
        writer.flush()
    say(f"{writer.tokens} tokens in {job.out}; left out: {sieve.left_out}")
    return writer.tokens


class _Sieve:
    """Lets a document through unless its first question was there before or is kept out."""

    def __init__(self, tokenizer: Tokenizer, kept_out: KeptOut, writer: CorpusWriter) -> None:
        self._tokenizer = tokenizer
        self._kept_out = kept_out
        self._writer = writer
        self._seen = set[bytes]()
        self.unanswered = self.twice = self.overlapping = 0

    @property
    def left_out(self) -> str:
        """How many documents were, and why."""
        return (
            f"{self.twice} said before, {self.unanswered} without an answer, "
            f"{self.overlapping} with words of prompts that are kept out"
        )

    def remember(self, corpus: Corpus) -> None:
        """What an earlier run wrote was said before."""
        for span in corpus.documents:
            tokens, answers = corpus.tokens(span), corpus.answers(span)
            self._seen.add(tokens[: answers.argmax()].tobytes())

    def take(self, document: Document) -> None:
        question = document.tokens[: document.answers.argmax()].tobytes()
        if not document.answers.any():
            self.unanswered += 1
        elif question in self._seen:
            self.twice += 1
        elif self._kept_out.overlap(self._tokenizer.decode(document.tokens.tolist())):
            self.overlapping += 1
        else:
            self._seen.add(question)
            self._writer.add(document)


def _kept(job: CaptureJob, config: ModelConfig) -> Kept:
    match job.keep:
        case "states":
            return Kept(state_size=config.hidden_size)
        case "top":
            return Kept(top=min(job.top, config.vocab_size))
        case "nothing":
            return Kept()
    raise ConfigError(f"--keep must be states, top or nothing, is {job.keep!r}")


def _plans(job: CaptureJob, tokenizer: Tokenizer) -> Iterator[Plan]:
    frame, style = chat_frame(tokenizer), Style()
    if job.data is None:
        openers = [[_plain(tokenizer, text) for text in texts] for texts in OPENERS.values()]
        return self_written(frame, openers, style, job.seed)
    kept_out = KeptOut(kept_out_texts(job.kept_out))
    prompts = [_checked(prompt, kept_out, job.data) for prompt in read_prompts(job.data)]
    return answered(
        [[_plain(tokenizer, turn) for turn in prompt.turns] for prompt in prompts],
        frame,
        style,
        job.seed,
    )


def _checked(prompt: Prompt, kept_out: KeptOut, path: Path) -> Prompt:
    for turn in prompt.turns:
        if shared := kept_out.overlap(turn):
            raise ConfigError(
                f"{path} holds a prompt that is kept out of training ({shared!r}); remove it"
            )
    return prompt


def chat_frame(tokenizer: Tokenizer) -> Frame:
    """The tokens around what a user says. Raises ConfigError for a model without a template."""
    if tokenizer.template is None:
        raise ConfigError("the model has no chat template; capture needs an instruct model")
    marks = ("\u2402first\u2402", "\u2402second\u2402", "\u2402third\u2402")
    roles = ("user", "assistant", "user")
    rendered = tokenizer.template.render(
        [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    )
    before, _, rest = rendered.partition(marks[0])
    _, _, rest = rest.partition(marks[1])
    again, _, answer = rest.partition(marks[2])
    return Frame(*(_plain(tokenizer, text) for text in (before, answer, again)))


def _plain(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.library.encode(text, add_special_tokens=False).ids)


def _until(plans: Iterator[Plan], writer: CorpusWriter, tokens: int) -> Iterator[Plan]:
    """Plans for as long as more tokens are wanted."""
    for plan in plans:
        if writer.tokens >= tokens:
            return
        yield plan


def _check_disk(job: CaptureJob, kept: Kept, written: int, say: Callable[[str], object]) -> None:
    """Say how much is to be written. Raises ConfigError if there is no room for it."""
    need = max(0, job.tokens - written) * kept.token_bytes
    free = shutil.disk_usage(job.out).free
    say(
        f"{job.tokens} tokens, {written} of them there: {need / 1e6:.0f} MB more in {job.out} "
        f"({kept.token_bytes} bytes each; {free / 1e6:.0f} MB are free)"
    )
    if need + SPARE_BYTES > free:
        raise ConfigError(
            f"{job.out} has room for {free / 1e6:.0f} MB, {need / 1e6:.0f} are needed; ask for "
            "fewer tokens, keep less (--keep top or nothing), or give another folder"
        )
