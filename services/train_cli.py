"""`paceline capture` and `paceline train`: a corpus a target wrote, and drafters made from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from services import terminal
from services.errors import ConfigError, PacelineError

BENCHMARK = "shared/data/spec_bench/questions.jsonl"

train = typer.Typer(no_args_is_help=True, help="Make drafters for a target.")

Target = Annotated[str, typer.Option(help="a pulled model, a Hugging Face folder or a hub name")]
Out = Annotated[Path, typer.Option(help="the folder to write; a run goes on from what is there")]
KeepOut = Annotated[
    list[Path] | None,
    typer.Option(help="JSON lines of benchmark prompts that nothing may be trained on"),
]
Layers = Annotated[str, typer.Option(help="the target's layers to start from: 0,1,28,29")]


def capture(
    target: Target,
    out: Out,
    tokens: Annotated[int, typer.Option(min=1, help="how many to write")] = 1_000_000,
    data: Annotated[Path | None, typer.Option(help="prompts to answer; none: its own")] = None,
    keep_out: KeepOut = None,
    keep: Annotated[str, typer.Option(help="of the target: states, top or nothing")] = "states",
    top: Annotated[int, typer.Option(min=1, help="how many best tokens `--keep top` keeps")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="conversations at once")] = 64,
    max_length: Annotated[int, typer.Option(min=32, help="tokens of a conversation")] = 768,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Have a target write conversations, to train drafters on what it says."""
    from services.capturing import CaptureJob
    from services.capturing import capture as run

    job = CaptureJob(
        target,
        out,
        tokens,
        data=data,
        kept_out=kept_out(keep_out),
        keep=keep,
        top=top,
        batch=batch,
        max_length=max_length,
        threads=threads,
        seed=seed,
    )
    with terminal.stage_bars() as bars:
        _guarded(lambda: run(job, _say, bars))


@train.command()
def distill(
    target: Target,
    out: Out,
    data: Annotated[list[Path], typer.Option(help="a folder that `paceline capture` wrote")],
    layers: Layers = "",
    draft_vocab: Annotated[int, typer.Option(min=0, help="tokens it can propose; 0: all")] = 8192,
    steps: Annotated[int, typer.Option(min=1)] = 2000,
    rate: Annotated[float, typer.Option(help="the highest learning rate")] = 2e-3,
    tokens: Annotated[int, typer.Option(min=16, help="of a batch, fill included")] = 1024,
    length: Annotated[int, typer.Option(min=16, help="the longest piece of a document")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", "-t")] = 1.0,
    hard: Annotated[float, typer.Option(help="share of the corpus's tokens as labels")] = 0.0,
    features: Annotated[float, typer.Option(help="weight of the last hidden state")] = 0.0,
    loss: Annotated[str, typer.Option(help="kl, or mse of logits")] = "kl",
    teacher: Annotated[list[str] | None, typer.Option(help="further teachers, averaged")] = None,
    on_policy: Annotated[float, typer.Option(help="share of batches the student writes")] = 0.0,
    online: Annotated[bool, typer.Option(help="the teacher learns the corpus meanwhile")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="export matrices as int8")] = False,
    workers: Annotated[int, typer.Option(min=1, help="devices, by Ray Train if several")] = 1,
    keep_out: KeepOut = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Distil a student: fewer of the target's layers that say what the target would say."""
    from drafter_workers.methods.student import DistillConfig
    from drafter_workers.training.batches import BatchConfig
    from drafter_workers.training.loop import LoopConfig
    from services.distilling import DistillJob
    from services.distilling import distill as run
    from services.training_report import line

    def work() -> None:
        job = DistillJob(
            target,
            out,
            tuple(data),
            layers=_numbers(layers),
            draft_vocab=draft_vocab,
            int8=int8,
            kept_out=kept_out(keep_out),
            workers=workers,
            teachers=tuple(teacher or ()),
            online=online,
            on_policy=on_policy,
            loss=DistillConfig(temperature, hard, features, loss),
            batches=BatchConfig(length, tokens, seed),
            loop=LoopConfig(steps, rate, seed=seed),
        )
        run(job, _say, lambda record: _say(line(record)))

    _guarded(work)


def kept_out(named: list[Path] | None) -> tuple[Path, ...]:
    """The benchmark prompts to keep out: those named, and the project's own where they lie.

    They are looked for from here up and from this file up.
    """
    here, this = Path.cwd(), Path(__file__).resolve()
    own = [
        path
        for root in (here, *here.parents, *this.parents)
        for path in (root / "tests/data/prompts.jsonl", root / BENCHMARK)
    ]
    return tuple(dict.fromkeys([*(named or ()), *(path for path in own if path.is_file())]))


def _say(text: str) -> None:
    """A line to the user, as it is: a log may be kept of them."""
    terminal.err.print(text, markup=False, soft_wrap=True)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"--layers must be numbers with commas, is {text!r}") from error


def _guarded(work: Callable[[], object]) -> None:
    """Run what may fail for reasons a user can do something about. Raises PacelineError."""
    from drafter_workers.training.corpus import CorpusError
    from drafter_workers.training.errors import TrainingError
    from services.pull import PullError
    from target_workers.model.config import ModelError

    try:
        work()
    except KeyboardInterrupt:
        _say("stopped; the same command goes on from what is kept")
        raise
    except PacelineError:
        raise
    except (CorpusError, TrainingError, ModelError, PullError, ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
