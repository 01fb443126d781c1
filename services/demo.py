"""The demonstration: six prompts through the real server, plainly and with both speculations."""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from rich.table import Table

from protos.paceline.v1 import generation_pb2 as pb
from services import terminal
from services.client import Client, ModeName, Options
from services.config import Config, load
from services.demo_prompts import PROMPTS, Prompt
from services.launch import launched
from services.measure import Sample, Summary, summarise
from services.pull import pull

MODEL = "smollm2-135m"
STUDENT = "smollm2-135m-student"
GUESSES = 6
NAMES: dict[ModeName, str] = {"off": "plain", "sync": "synchronous", "async": "asynchronous"}


@dataclass(frozen=True, slots=True)
class Result:
    """One mode's streams, prompt by prompt."""

    mode: ModeName
    samples: tuple[Sample, ...]

    @property
    def summary(self) -> Summary:
        return summarise(self.samples)


def fetch() -> None:
    """Have the model here, with bars while it comes."""
    with terminal.stage_bars() as bars:
        pull(MODEL, bars)


async def run_demo(max_tokens: int, *, as_json: bool) -> None:
    """Serve the model on this machine's cores, ask, and print one table."""
    async with (
        launched(_config(), terminal.err.print) as service,
        Client(service.address) as client,
    ):
        if not as_json:
            await _show(client, max_tokens)
        results = [await _run(client, mode, max_tokens) for mode in NAMES]
    different = differing(results)
    if as_json:
        terminal.out.print_json(json.dumps(report(results, different)))
    else:
        _print(results, different, max_tokens)
    if different:
        raise SystemExit(1)


def differing(results: Sequence[Result]) -> list[str]:
    """The kinds of prompts whose answers are not the same tokens in every mode."""
    answers = [[sample.tokens for sample in result.samples] for result in results]
    return [
        prompt.kind
        for prompt, *tokens in zip(PROMPTS, *answers, strict=True)
        if len(set(tokens)) > 1
    ]


async def ask(
    client: Client, prompt: Prompt, options: Options, show: Callable[[str], None]
) -> Sample:
    """One streamed answer, timed; `show` gets its text as it comes."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=prompt.text)])
    sent = time.perf_counter()
    first_s = 0.0
    tokens: list[int] = []
    spent = pb.SpeculationStats()
    async with aclosing(client.generate_stream(chat, options)) as events:
        async for event in events:
            if isinstance(event, pb.Delta):
                first_s = first_s or time.perf_counter() - sent
                tokens.extend(event.token_ids)
                show(event.text)
            elif isinstance(event, pb.Finished):
                spent = event.speculation
    return Sample(
        tokens=tuple(tokens),
        first_s=first_s,
        total_s=time.perf_counter() - sent,
        rounds=spent.num_spec_steps,
        accepted=spent.num_accepted_draft_tokens,
        hits=spent.num_hits,
        drafted=spent.num_draft_tokens,
    )


async def _show(client: Client, max_tokens: int) -> None:
    """Every prompt and its answer, streamed as it comes."""
    for prompt in PROMPTS:
        terminal.stream(f"\n[{prompt.kind}] {prompt.text}\n\n")
        await ask(client, prompt, Options(max_tokens=max_tokens), terminal.stream)
        terminal.stream("\n")


async def _run(client: Client, mode: ModeName, max_tokens: int) -> Result:
    """All prompts in one mode, with a bar that counts them."""
    options = Options(max_tokens=max_tokens, mode=mode)
    samples = []
    with terminal.stage_bars() as bars:
        for done, prompt in enumerate(PROMPTS):
            bars(NAMES[mode], done, len(PROMPTS))
            samples.append(await ask(client, prompt, options, lambda text: None))
        bars(NAMES[mode], len(PROMPTS), len(PROMPTS))
    return Result(mode, tuple(samples))


def _config() -> Config:
    """The model served on all cores, drafted by the student that comes with the package."""
    return load(
        overrides=[
            f"model.path={MODEL}",
            f"drafter.0.path={STUDENT}",
            "speculation.shape=tree",
            f"speculation.k={GUESSES}",
            "server.grpc=127.0.0.1:0",
            "server.health=127.0.0.1:0",
            "server.http=",
            "server.metrics=",
        ]
    )


def _print(results: Sequence[Result], different: Sequence[str], max_tokens: int) -> None:
    table = Table(title=f"{MODEL}, {len(PROMPTS)} prompts one after the other, greedy")
    for column in ("", "tokens/s", "accepted length", "hit rate", "first token"):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        total = result.summary
        table.add_row(
            NAMES[result.mode],
            f"{total.tokens_per_s:.1f}",
            f"{total.accepted_length:.2f}",
            f"{total.hit_rate:.0%}",
            f"{total.first_s * 1000:.0f} ms",
        )
    terminal.out.print()
    terminal.out.print(table)
    terminal.out.print(_machine(), f"at most {max_tokens} tokens each;")
    terminal.out.print(
        f"drafted by {STUDENT} and by prompt lookup. Every prompt was answered once before, so "
        "first tokens come from the prefix cache."
    )
    verdict = "yes" if not different else f"NO: {', '.join(different)}"
    terminal.out.print(f"identical output: {verdict}")


def report(results: Sequence[Result], different: Sequence[str]) -> dict[str, object]:
    """The whole outcome as plain values."""
    return {
        "machine": _machine(),
        "modes": {
            NAMES[r.mode]: {**asdict(r.summary), "tokens_per_s": r.summary.tokens_per_s}
            for r in results
        },
        "identical": not different,
    }


def _machine() -> str:
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()},"
