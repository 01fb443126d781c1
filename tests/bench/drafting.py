"""What a drafter gives, alone: `python -m tests.bench.drafting --drafter PATH`.

The real service answers every prompt's first turn plainly and in every way asked for, one answer
at a time, with this drafter as the only source of guesses. Answers that differ end it with 1.
"""

import argparse
import asyncio
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from services import demo_prompts, terminal
from services.client import Client, ModeName, Options
from services.config import Config, load
from services.demo import ask
from services.errors import ConfigError, PacelineError
from services.launch import launched
from services.lifecycle import until_signal
from services.measure import Sample, Summary, summarise
from services.prompts import Prompt
from tests import prompts
from tests.bench.target import machine

WARM_UP = 8  # tokens
TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to answer; plain decoding has no k."""

    temperature: float
    mode: ModeName
    k: int | None = None

    @property
    def name(self) -> str:
        return "plain" if self.k is None else f"{self.mode} {self.k}"

    def options(self, prompt: Prompt, max_tokens: int) -> Options:
        """What to ask for; a prompt has the same seed in every run and setting."""
        seed = zlib.crc32(prompt.turns[0].encode())
        return Options(
            temperature=self.temperature, seed=seed, max_tokens=max_tokens, mode=self.mode, k=self.k
        )


@dataclass(frozen=True, slots=True)
class Answers:
    """One prompt's answers, setting by setting."""

    prompt: Prompt
    samples: dict[Setting, Sample]

    def differing(self, temperature: float) -> list[str]:
        """The settings that gave other tokens than plain decoding."""
        plain = self.samples[Setting(temperature, "off")].tokens
        return [
            setting.name
            for setting, sample in self.samples.items()
            if setting.temperature == temperature and sample.tokens != plain
        ]


@dataclass(frozen=True, slots=True)
class Row:
    """What one setting amounts to over the prompts of a kind, or over all."""

    setting: Setting
    kind: str
    prompts: int
    summary: Summary


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt whose answers at a temperature are not all the same."""

    temperature: float
    kind: str
    prompt: str
    settings: list[str]


def settings_of(asked: argparse.Namespace) -> list[Setting]:
    """Plain decoding at every temperature, and every mode with every k."""
    return [
        setting
        for temperature in dict.fromkeys(asked.temperature)
        for setting in (
            Setting(temperature, "off"),
            *(
                Setting(temperature, mode, k)
                for mode in dict.fromkeys(asked.mode)
                if mode != "off"
                for k in dict.fromkeys(asked.k)
            ),
        )
    ]


def config_of(asked: argparse.Namespace) -> Config:
    """The model served with this drafter, which is waited for, and nothing else that guesses."""
    return load(
        overrides=[
            f"model.path={asked.model}",
            f"drafter.0.path={asked.drafter}",
            "drafter.0.required=true",
            'speculation.sources=["drafter"]',
            f"speculation.shape={asked.shape}",
            "server.grpc=127.0.0.1:0",
            "server.health=127.0.0.1:0",
            "server.http=",
            "server.metrics=",
        ]
    )


async def run(
    config: Config, chosen: Sequence[Prompt], settings: Sequence[Setting], max_tokens: int
) -> list[Answers]:
    """Every prompt in every setting, prompt by prompt, so that a busy minute hits them all."""
    answers = []
    async with launched(config, terminal.err.print) as service, Client(service.address) as client:
        with terminal.stage_bars() as bars:
            for done, setting in enumerate(settings):
                bars("warming up", done, len(settings))
                await answer(client, chosen[0], setting, WARM_UP)
            bars("warming up", len(settings), len(settings))
            total = len(chosen) * len(settings)
            for prompt in chosen:
                # The target's prefix cache has it from here on, for all settings alike.
                await answer(client, prompt, settings[0], 1)
                samples = {}
                for setting in settings:
                    bars("answers", len(answers) * len(settings) + len(samples), total)
                    samples[setting] = await answer(client, prompt, setting, max_tokens)
                answers.append(Answers(prompt, samples))
            bars("answers", total, total)
    return answers


async def answer(client: Client, prompt: Prompt, setting: Setting, max_tokens: int) -> Sample:
    """The answer to the prompt's first turn, in the model's chat template."""
    asked = demo_prompts.Prompt(prompt.kind, prompt.turns[0])
    return await ask(client, asked, setting.options(prompt, max_tokens), lambda text: None)


def rows_of(answers: Sequence[Answers]) -> Iterator[Row]:
    """By setting, for every kind and in total."""
    kinds = dict.fromkeys(each.prompt.kind for each in answers)
    for setting in answers[0].samples:
        for kind in (*kinds, TOTAL):
            samples = [
                each.samples[setting] for each in answers if kind in (each.prompt.kind, TOTAL)
            ]
            yield Row(setting, kind, len(samples), summarise(samples))


def differences(answers: Iterable[Answers]) -> Iterator[Difference]:
    """Where drafting changed an answer, which it must not."""
    for each in answers:
        for temperature in dict.fromkeys(setting.temperature for setting in each.samples):
            if found := each.differing(temperature):
                yield Difference(temperature, each.prompt.kind, each.prompt.turns[0], found)


def report(rows: Iterable[Row], different: Sequence[Difference]) -> dict[str, object]:
    """The whole outcome as plain values."""
    return {
        "rows": [
            {
                **asdict(row.setting),
                "kind": row.kind,
                "prompts": row.prompts,
                **asdict(row.summary),
                "tokens_per_s": row.summary.tokens_per_s,
            }
            for row in rows
        ],
        "identical": not different,
        "different": [asdict(each) for each in different],
    }


def show(rows: Sequence[Row], different: Sequence[Difference]) -> None:
    """Tables for people, then whether all answers are the same."""
    for temperature in dict.fromkeys(row.setting.temperature for row in rows):
        of_it = [row for row in rows if row.setting.temperature == temperature]
        drafted = [row for row in of_it if row.setting.mode != "off"]
        at = f"temperature {temperature:g}"
        if drafted:
            _print(f"accepted length, {at}", drafted, lambda s: f"{s.accepted_length:.2f}")
            _print(f"acceptance, {at}", drafted, lambda s: f"{s.acceptance:.0%}")
        _print(f"tokens/s, {at}", of_it, lambda s: f"{s.tokens_per_s:.1f}")
    for each in different:
        terminal.out.print(
            f"{each.kind}, temperature {each.temperature:g}, {', '.join(each.settings)}:",
            repr(each.prompt[:60]),
            markup=False,
        )
    terminal.out.print(f"identical output: {'NO' if different else 'yes'}")


def _print(title, rows: Sequence[Row], figure) -> None:
    """Kinds down, settings across."""
    by_place = {(row.kind, row.setting): row for row in rows}
    table = Table("", "prompts", title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    settings = dict.fromkeys(row.setting for row in rows)
    for setting in settings:
        table.add_column(setting.name, justify="right")
    for kind in dict.fromkeys(row.kind for row in rows):
        across = [by_place[kind, setting] for setting in settings]
        if kind == TOTAL:
            table.add_section()
        table.add_row(kind, str(across[0].prompts), *(figure(row.summary) for row in across))
    terminal.out.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", required=True, help="a shipped or pulled model, or a folder")
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model or a folder")
    parser.add_argument("--prompts", type=Path, default=prompts.default_path(), help="JSON lines")
    parser.add_argument("--limit", type=int, help="so many prompts, evenly over their kinds")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--shape", choices=["chain", "tree"], default="chain")
    modes = ["off", "sync", "async"]
    parser.add_argument(
        "--mode", nargs="+", choices=modes, default=modes, help="besides plain decoding"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


async def measure(asked: argparse.Namespace) -> None:
    """Load, ask, and say what came of it. Ends with 1 if an answer differs."""
    try:
        every = prompts.load(asked.prompts)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    chosen = prompts.spread(every, len(every) if asked.limit is None else max(1, asked.limit))
    answers = await run(config_of(asked), chosen, settings_of(asked), asked.max_tokens)
    rows, different = list(rows_of(answers)), list(differences(answers))
    if asked.json:
        how = {"machine": machine(), **vars(asked), "prompts": str(asked.prompts)}
        print(json.dumps(how | report(rows, different)))
    else:
        show(rows, different)
        terminal.out.print(
            f"{asked.model} drafted by {asked.drafter} alone ({asked.shape}); {machine()}",
            f"at most {asked.max_tokens} tokens each",
            sep="; ",
        )
    if different:
        raise SystemExit(1)


def main() -> None:
    try:
        stopped_by = asyncio.run(until_signal(measure(arguments()), terminal.err.print))
    except PacelineError as error:
        terminal.fail(error)
        sys.exit(1)
    if stopped_by:
        sys.exit(128 + stopped_by)


if __name__ == "__main__":
    main()
