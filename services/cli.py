"""The `paceline` command. Each command's heavy imports are its own, so that clients stay light."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from protos.paceline.v1 import generation_pb2 as pb
from services import terminal
from services.client import Client, ModeName, Options, Prompt
from services.errors import ConfigError, PacelineError, RequestFailed
from services.tables import Table, build, override
from services.train_cli import capture, train

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)

app.command()(capture)
app.add_typer(train, name="train")

SIGNALLED = 128  # and the signal's number: how shells tell a command ended by one
INTERRUPTED = SIGNALLED + signal.SIGINT
ADDRESS = "127.0.0.1:50051"

Server = Annotated[str, typer.Option("--server", "-s", help="host:port of the gRPC server")]
Tokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="most tokens to generate")]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy")]
Seed = Annotated[int | None, typer.Option(help="makes sampling reproducible")]
Mode = Annotated[str | None, typer.Option(help="speculation: off, sync or async")]
Guesses = Annotated[int | None, typer.Option("-k", help="guesses per verification")]
AsJson = Annotated[bool, typer.Option("--json", help="print events as JSON lines")]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="a paceline.toml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="key=value over the file")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="anything else to ask for: top_p=0.9, logit_bias={42=-100}, ..."),
]


@app.command()
def pull(name: Annotated[str, typer.Argument(help="a known model")] = "smollm2-135m") -> None:
    """Fetch a known model into the cache."""
    from services.pull import pull as pull_model

    with terminal.stage_bars() as bars:
        pulled = pull_model(name, bars)
    terminal.out.print(f"{name} {'is now' if pulled.fresh else 'was already'} in {pulled.folder}")


@app.command()
def serve(config: ConfigFile = None, set_: Overrides = None) -> None:
    """Start Ray here or join it, place the workers, and serve until stopped."""
    from services.config import load
    from services.launch import serve as serve_until_stopped

    asyncio.run(serve_until_stopped(load(config, set_ or ()), terminal.err.print))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="a question; `-` reads standard input")],
    server: Server = ADDRESS,
    max_tokens: Tokens = 256,
    temperature: Temperature = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="a text that ends the answer")] = None,
    mode: Mode = None,
    k: Guesses = None,
    raw: Annotated[bool, typer.Option(help="continue the text, without a chat template")] = False,
    set_: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Stream one answer. `--set` takes every field of `services.client.Options`."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options = Options(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        mode=_mode(mode),
        k=k,
    )
    options = _with(options, set_ or ())
    if not as_json and (options.logprobs, options.prompt_logprobs) != (None, None):
        raise ConfigError("log-probabilities are printed as JSON alone; add --json")
    asked: Prompt = text if raw else _chat([("user", text)])
    asyncio.run(_generate(server, asked, options, as_json=as_json))


@app.command()
def chat(
    server: Server = ADDRESS,
    max_tokens: Tokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    mode: Mode = None,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
) -> None:
    """Talk; an empty line or Ctrl-D ends it, Ctrl-C stops an answer."""
    options = Options(temperature=temperature, seed=seed, max_tokens=max_tokens, mode=_mode(mode))
    turns = [("system", system)] if system else []
    while line := _ask():
        asked = [*turns, ("user", line)]
        parts: list[str] = []
        try:
            asyncio.run(_generate(server, _chat(asked), options, parts.append))
        except KeyboardInterrupt:
            terminal.out.print(" (stopped)")
        except RequestFailed as failed:
            terminal.fail(failed)
        # What was shown was said; a question without an answer was not asked.
        if parts:
            turns = [*asked, ("assistant", "".join(parts))]


@app.command()
def demo(max_tokens: Tokens = 96, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Fetch the small model, serve it here, and compare plain decoding with speculation."""
    from services.demo import fetch, run_demo
    from services.lifecycle import until_signal

    fetch()
    work = run_demo(max_tokens or 96, as_json=as_json)
    if stopped_by := asyncio.run(until_signal(work, terminal.err.print)):
        raise typer.Exit(SIGNALLED + stopped_by)


async def _generate(
    server: str,
    prompt: Prompt,
    options: Options,
    heard: Callable[[str], object] = lambda text: None,
    *,
    as_json: bool = False,
) -> None:
    """Stream an answer to the terminal; `heard` gets every text that was shown.

    Of several choices the first is streamed and the others follow it.
    """
    others: dict[int, str] = {}
    async with (
        Client(server) as client,
        aclosing(client.generate_stream(prompt, options)) as events,
    ):
        async for event in events:
            if as_json:
                kind = type(event).__name__.lower()
                fields = MessageToDict(event, preserving_proto_field_name=True)
                terminal.stream(json.dumps({kind: fields}) + "\n")
            elif isinstance(event, pb.Delta) and event.choice:
                others[event.choice] = others.get(event.choice, "") + event.text
            elif isinstance(event, pb.Delta):
                terminal.stream(event.text)
                heard(event.text)
    if not as_json:
        texts = [f"\n--- choice {choice}\n{text}\n" for choice, text in sorted(others.items())]
        terminal.stream("\n" + "".join(texts))


def _chat(turns: list[tuple[str, str]]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in turns])


def _ask() -> str:
    try:
        return terminal.out.input("[bold]>[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _with(options: Options, assignments: Sequence[str]) -> Options:
    """The options with `name=value` assignments on top. Raises ConfigError."""
    table: Table = {}
    for assignment in assignments:
        override(table, assignment)
    bias = _bias(table.pop("logit_bias", {}))
    asked = build(Options, table)
    return replace(options, logit_bias=bias, **{name: getattr(asked, name) for name in table})


def _bias(entries: object) -> dict[int, float]:
    try:
        if not isinstance(entries, dict):
            raise TypeError
        return {int(id): float(value) for id, value in entries.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError("logit_bias must be set as {ID=VALUE, ...}, in numbers") from error


def _mode(name: str | None) -> ModeName | None:
    match name:
        case None | "off" | "sync" | "async":
            return name
    raise ConfigError(f"--mode must be off, sync or async, is {name!r}")


def main() -> None:
    """Run the command; an error is one line with its remedy, not a traceback."""
    try:
        app()
    except PacelineError as error:
        terminal.fail(error)
        sys.exit(1)
    except ModuleNotFoundError as missing:
        terminal.fail(
            ConfigError(f"{missing.name} is not installed; run `pip install 'paceline[serve]'`")
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
