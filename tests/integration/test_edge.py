"""Clients over gRPC against real engines: how many run, who waits, and what a lost client frees."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from drafter_workers.config import DrafterConfig
from drafter_workers.loading import load_drafter
from orchestrator.config import CoreConfig
from orchestrator.core import Core
from orchestrator.k_policy import FixedK
from orchestrator.local_port import LocalPort
from orchestrator.runtime import Runtime
from protos.engine_thread import LinkLimits
from protos.paceline.v1 import generation_pb2 as pb
from services.client import Client, Options
from services.config import ServerConfig
from services.errors import InvalidRequest, Overloaded, RequestFailed, Unavailable
from services.server import Server
from services.text import make_stopper
from services.tokenizer import load_tokenizer
from services.translate import Served
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from tests.tiny import make_tiny_llama
from tests.unit.services.tiny_folder import VOCAB_SIZE, byte_level_folder

MAX_SEQUENCES, MAX_QUEUE = 8, 2
CONTEXT = 1024
LONG = Options(max_tokens=900, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Edge:
    """A server over real engines in this process."""

    runtime: Runtime
    address: str


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    folder = make_tiny_llama(byte_level_folder(tmp_path), seed=1, vocab=VOCAB_SIZE)
    async with serving(folder) as made:
        yield made


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Edge]:
    tokenizer = load_tokenizer(folder)
    hashed = tokenizer.vocab_hash
    target = TargetConfig(str(folder), dtype="fp32", num_pages=1024, max_context=CONTEXT)
    drafter = DrafterConfig(str(folder), dtype="fp32", num_slots=16384, max_context=CONTEXT)
    ports = [
        LocalPort(name, build, LinkLimits())
        for name, build in (
            ("target", lambda: load_target(target, vocab_hash=hashed, incarnation=1)),
            ("drafter", lambda: load_drafter(drafter, vocab_hash=hashed, incarnation=1)),
        )
    ]
    config = CoreConfig(MAX_SEQUENCES, MAX_QUEUE, max_context=CONTEXT)
    core = Core(config, FixedK(4), partial(make_stopper, tokenizer))
    runtime = Runtime(core, ports[:1], ports[1:])
    await runtime.start()
    await runtime.wait_ready(60)
    settings = ServerConfig(
        grpc="127.0.0.1:0", health="127.0.0.1:0", http="", metrics="", drain_s=1
    )
    server = Server(Served("tiny", "1", CONTEXT, tokenizer), runtime, settings, 600.0)
    await server.start()
    await server.set_ready(is_ready=True)
    try:
        yield Edge(runtime, f"127.0.0.1:{server.port}")
    finally:
        await server.stop()
        await runtime.stop()
        for port in ports:
            await port.stop()


async def first_delta(events) -> None:
    async for event in events:
        if isinstance(event, pb.Delta):
            return


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the core has no event for it
            await asyncio.sleep(0.002)


async def test_eight_stream_at_once_a_ninth_waits_and_more_are_refused(edge: Edge) -> None:
    async with Client(edge.address) as client:
        running = [client.generate_stream(f"cat {i}", LONG) for i in range(MAX_SEQUENCES)]
        await asyncio.gather(*(first_delta(events) for events in running))
        assert len(list(edge.runtime.core.sequences)) == MAX_SEQUENCES
        waiting = [
            asyncio.create_task(first_delta(client.generate_stream("wait", LONG)))
            for _ in range(MAX_QUEUE)
        ]
        await until(lambda: edge.runtime.core.waiting == MAX_QUEUE)
        with pytest.raises(Overloaded) as refused:
            await first_delta(client.generate_stream("too many", LONG))
        assert refused.value.retry_s > 0
        assert not any(task.done() for task in waiting), "the queue waits for a place"
        await running[0].aclose()
        done, _ = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1, "a place that is free goes to one that waits"
        for events in running[1:]:
            await events.aclose()
        await asyncio.wait_for(asyncio.gather(*waiting), 20)


async def test_a_client_that_goes_away_frees_its_sequence_within_one_step(edge: Edge) -> None:
    async with Client(edge.address) as client:
        stays = client.generate_stream("the dog", LONG)
        goes = client.generate_stream("the cat", LONG)
        await asyncio.gather(first_delta(stays), first_delta(goes))
        both = {seq.seq for seq in edge.runtime.core.sequences}
        await goes.aclose()
        await until(lambda: len(list(edge.runtime.core.sequences)) == 1)
        (gone,) = both - {seq.seq for seq in edge.runtime.core.sequences}
        steps = edge.runtime.core.counters.steps
        await until(lambda: edge.runtime.core.counters.steps > steps + 1)
        for name, account in (await edge.runtime.audit()).items():
            assert account is not None
            assert gone not in {held.seq for held in account.held}, name
        await stays.aclose()


async def test_a_stream_tells_its_usage_reason_and_speculation(edge: Edge) -> None:
    tokens: list[int] = []
    options = Options(max_tokens=30, ignore_eos=True)
    async with (
        Client(edge.address) as client,
        aclosing(client.generate_stream([5, 6, 7, 8], options)) as events,
    ):
        async for event in events:
            if isinstance(event, pb.Delta):
                tokens.extend(event.token_ids)
            last = event
    assert isinstance(last, pb.Finished)
    assert last.reason == pb.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 30)
    assert len(tokens) == 30
    stats = last.speculation
    assert stats.num_spec_steps + stats.num_accepted_draft_tokens == 30
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps


async def test_a_stream_that_outlasts_the_drain_is_told_to_resume(edge: Edge) -> None:
    async with Client(edge.address) as client:
        events = client.generate_stream("the cat", LONG)
        await first_delta(events)
        draining = asyncio.create_task(edge.runtime.drain(0.05))
        with pytest.raises(Unavailable, match="resume") as cut:
            async for _ in events:
                pass
        await draining
    assert cut.value.retry_s > 0
    await until(lambda: not list(edge.runtime.core.sequences))


@dataclass
class Heard:
    """What came of one choice."""

    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    text: str = ""
    finished: pb.Finished | None = None


async def heard(edge: Edge, prompt: Sequence[int], options: Options) -> tuple[pb.Started, dict]:
    """The first event, and every choice by its number."""
    choices: dict[int, Heard] = defaultdict(Heard)
    async with (
        Client(edge.address) as client,
        aclosing(client.generate_stream(prompt, options)) as events,
    ):
        async for event in events:
            match event:
                case pb.Started():
                    started = event
                case pb.Delta():
                    choice = choices[event.choice]
                    choice.tokens += event.token_ids
                    choice.scores += [score.logprob for score in event.scores]
                    choice.text += event.text
                case pb.Finished():
                    choices[event.choice].finished = event
    return started, dict(choices)


PROMPT = (5, 6, 7, 8, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45)


async def test_each_of_several_choices_is_what_it_would_be_alone(edge: Edge) -> None:
    several = Options(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, n=4, logprobs=0)
    started, choices = await heard(edge, PROMPT, several)
    assert sorted(choices) == [0, 1, 2, 3]
    assert len({tuple(choice.tokens) for choice in choices.values()}) == 4
    for seed, choice in zip(started.choice_seeds, map(choices.get, range(4)), strict=True):
        _, alone = await heard(edge, PROMPT, replace(several, seed=seed, n=None))
        assert alone[0].tokens == choice.tokens
        assert alone[0].scores == choice.scores
        assert alone[0].text == choice.text
        assert len(choice.scores) == len(choice.tokens) == 20
        assert choice.finished.reason == pb.FINISH_REASON_LENGTH
    await until(lambda: not list(edge.runtime.core.sequences))


async def test_who_leaves_ends_all_choices(edge: Edge) -> None:
    async with Client(edge.address) as client:
        events = client.generate_stream("the dog", replace(LONG, n=3))
        await first_delta(events)
        await until(lambda: len(list(edge.runtime.core.sequences)) == 3)
        await events.aclose()
    await until(lambda: not list(edge.runtime.core.sequences))


@pytest.mark.parametrize("rule", ["match", "rejection", "sampled"])
async def test_a_rule_is_served_and_named(edge: Edge, rule: str) -> None:
    asked = Options(temperature=1.0, seed=3, rule=rule, max_tokens=40, ignore_eos=True, logprobs=2)
    started, choices = await heard(edge, PROMPT, asked)
    assert pb.Rule.Name(started.rule) == f"RULE_{rule.upper()}"
    assert len(choices[0].tokens) == len(choices[0].scores) == 40


async def test_a_lossy_rule_is_refused(edge: Edge) -> None:
    with pytest.raises(InvalidRequest, match="allow_lossy"):
        await heard(edge, PROMPT, Options(temperature=1.0, rule="typical"))


async def test_a_prompt_alone_is_scored(edge: Edge) -> None:
    async with Client(edge.address) as client:
        asked = Options(max_tokens=0, prompt_logprobs=1)
        events = [event async for event in client.generate_stream(PROMPT, asked)]
    started, *scored, finished = events
    assert isinstance(started, pb.Started)
    assert isinstance(finished, pb.Finished)
    assert finished.usage.completion_tokens == 0
    scores = [score for event in scored for score in event.scores]
    assert scored[0].start == 1
    assert len(scores) == len(PROMPT) - 1
    assert all(score.logprob < 0 and len(score.top_ids) == 1 for score in scores)


async def test_what_excludes_every_token_is_said_with_its_position(edge: Edge) -> None:
    repeats = Options(allowed_token_ids=(50,), no_repeat_ngram=2, max_tokens=9, ignore_eos=True)
    with pytest.raises(RequestFailed, match=r"no token can follow position \d+"):
        await heard(edge, PROMPT, repeats)
    await until(lambda: not list(edge.runtime.core.sequences))
