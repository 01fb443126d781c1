"""The command line against a real server with scripted answers."""

import asyncio
import json
import os
import sys

import pytest

from orchestrator.request import Finished, FinishReason, Stats
from protos.sampling import Bias
from services.grammar import choice_grammar
from services.translate import Served
from tests.unit.services.edge_fakes import FakeGenerations, edge, words

FREE = ("--set", "server.grpc=127.0.0.1:0", "--set", "server.health=127.0.0.1:0")
DONE = Finished(FinishReason.STOP, Stats(rounds=2, histogram=(2,)))


async def paceline(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from services.cli import main; main()",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 30)
    return process.returncode or 0, out.decode(), err.decode()


async def test_generate_prints_the_text_of_an_answer(served: Served) -> None:
    async with edge(served, FakeGenerations(words(served, "the cat sat"), DONE)) as (server, _):
        address = f"127.0.0.1:{server.port}"
        code, out, err = await paceline(
            "generate", "--server", address, "-n", "9", "--raw", "hello"
        )
    assert (code, out) == (0, "the cat sat\n"), err


async def test_generate_asks_for_whatever_is_set(served: Served) -> None:
    generations = FakeGenerations(words(served, "the"), DONE)
    settings = (
        "top_p=0.5",
        "logit_bias={42=-100}",
        'choice=["yes", "no"]',
        "cache_salt=mine",
        "n=2",
    )
    async with edge(served, generations) as (server, _):
        address = f"127.0.0.1:{server.port}"
        pairs = [part for setting in settings for part in ("--set", setting)]
        code, out, err = await paceline("generate", "-s", address, "-n", "9", *pairs, "--raw", "x")
    assert (code, out) == (0, "the\n\n--- choice 1\nthe\n"), err
    first, second = generations.requests
    processors = first.sampling.processors
    assert (processors.top_p, processors.bias) == (0.5, (Bias(42, -100.0),))
    assert processors.grammar == choice_grammar(["yes", "no"])
    assert (first.cache_salt, first.max_tokens) == ("mine", 9)
    assert second.parent == first.request_id


async def test_json_has_a_line_for_each_event(served: Served) -> None:
    async with edge(served, FakeGenerations(words(served, "the"), DONE)) as (server, _):
        address = f"127.0.0.1:{server.port}"
        code, out, err = await paceline(
            "generate", "-s", address, "-n", "9", "--raw", "--json", "hello"
        )
    events = [next(iter(json.loads(line))) for line in out.splitlines()]
    assert code == 0, err
    assert events[0] == "started"
    assert events[-1] == "finished"


async def test_chat_goes_on_until_an_empty_line(served: Served) -> None:
    generations = FakeGenerations(words(served, "the cat"), DONE)
    async with edge(served, generations) as (server, _):
        address = f"127.0.0.1:{server.port}"
        code, out, err = await paceline("chat", "-s", address, stdin="hi\nand then\n\n")
    assert code == 0, err
    assert out.count("the cat") == 2
    assert len(generations.requests) == 2
    assert len(generations.requests[1].prompt) > len(generations.requests[0].prompt)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["generate", "-s", "127.0.0.1:1", "x"], "paceline serve"),
        (["generate", "--mode", "fast", "x"], "off, sync or async"),
        (["generate", "--set", "top_q=0.5", "x"], "did you mean 'top_p'"),
        (["generate", "--set", "top_k=few", "x"], "top_k must be an integer"),
        (["generate", "--set", "logit_bias=5", "x"], "{ID=VALUE, ...}"),
        (["generate", "--set", "logprobs=2", "x"], "add --json"),
        (["generate", "--set", "regex=a", "--set", "any_json=true", "x"], "name one"),
        (["pull", "no-such-model"], "no-such-model"),
        (["serve", *FREE, "--set", "model.path=/no/such/folder"], "model.path"),
        (["serve", "--set", "speculation.moed=off"], "did you mean"),
    ],
)
async def test_an_error_is_one_line_with_its_remedy(arguments: list[str], cause: str) -> None:
    code, _, err = await paceline(*arguments)
    assert code == 1
    assert cause in err
    assert "Traceback" not in err
