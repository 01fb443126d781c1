"""The client: what it asks for, what it raises, and that it imports little."""

import asyncio
import subprocess
import sys

import pytest

from protos.paceline.v1 import generation_pb2 as pb
from services.client import Client, Options, request_of
from services.errors import InvalidRequest, Unavailable
from services.translate import Served
from tests.unit.services.edge_fakes import DONE, FakeGenerations, edge, words


def test_a_bare_request_leaves_every_choice_to_the_server() -> None:
    assert request_of("hi", Options()) == pb.GenerateStreamRequest(
        text="hi",
        sampling=pb.Sampling(),
        stopping=pb.Stopping(),
        speculation=pb.Speculation(),
        prefix_cache=pb.PrefixCache(),
        scoring=pb.Scoring(),
    )


def test_every_option_is_asked_for() -> None:
    options = Options(
        temperature=0.0,
        seed=0,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={3: -1.0},
        allowed_token_ids=(3, 4),
        no_repeat_ngram=2,
        rule="rejection",
        max_tokens=3,
        min_tokens=1,
        n=2,
        logprobs=1,
        prompt_logprobs=0,
        processed_logprobs=True,
        choice=("yes", "no"),
        cache_salt="x",
        bypass_cache=True,
        stop=("END",),
        stop_token_ids=(4,),
        include_stop=True,
        ignore_eos=True,
        mode="async",
        k=2,
        resumed_tokens=(7, 8),
        model="m",
        model_revision="r",
        request_id="id",
    )
    assert request_of([1, 2], options) == pb.GenerateStreamRequest(
        request_id="id",
        model="m",
        model_revision="r",
        token_ids=pb.TokenIds(ids=[1, 2]),
        sampling=pb.Sampling(
            temperature=0.0,
            seed=0,
            top_k=4,
            top_p=0.5,
            min_p=0.25,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={3: -1.0},
            allowed_token_ids=[3, 4],
            no_repeat_ngram=2,
            rule=pb.RULE_REJECTION,
        ),
        stopping=pb.Stopping(
            max_tokens=3,
            min_tokens=1,
            stop_strings=["END"],
            stop_token_ids=[4],
            ignore_eos=True,
            include_stop_str_in_output=True,
        ),
        resumed_tokens=[7, 8],
        speculation=pb.Speculation(mode=pb.SPECULATION_MODE_ASYNC, k=2),
        prefix_cache=pb.PrefixCache(cache_salt="x", bypass=True),
        n=2,
        scoring=pb.Scoring(logprobs=1, prompt_logprobs=0, processed=True),
        structured_output=pb.StructuredOutput(choice=pb.Choice(options=["yes", "no"])),
    )


def test_a_chat_is_a_prompt() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert request_of(chat, Options()).chat == chat


def test_an_empty_list_of_ids_is_an_empty_prompt() -> None:
    assert request_of([], Options()).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([2**31], Options()),
        ("a lone \ud800 surrogate", Options()),
        ("x", Options(seed=2**63)),
        ("x", Options(stop=("\udfff",))),
        ("x", Options(logit_bias={2**31: 1.0})),
        ("x", Options(regex="a", any_json=True)),
    ],
)
def test_what_no_message_can_hold_is_an_invalid_request(
    prompt: str | list[int], options: Options
) -> None:
    with pytest.raises(InvalidRequest):
        request_of(prompt, options)


async def test_no_server_is_unavailable_and_the_remedy_is_named() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match="paceline serve"):
            async for _ in client.generate_stream("x", timeout_s=5):
                pass


async def test_an_interrupted_reader_cancels_its_call(served: Served) -> None:
    generations = FakeGenerations(words(served, "the"), asyncio.Event())
    async with edge(served, generations) as (_, client):
        read = asyncio.Event()

        async def reader() -> None:
            async for _ in client.generate_stream("x"):
                read.set()

        task = asyncio.create_task(reader())
        await read.wait()
        task.cancel()  # as asyncio.run does on Ctrl-C
        await asyncio.wait([task])
        assert task.cancelled()
        await generations.until_running(0)


async def test_a_request_message_of_ones_own_is_sent_as_it_is(served: Served) -> None:
    generations = FakeGenerations(DONE)
    async with edge(served, generations) as (_, client):
        message = pb.GenerateStreamRequest(text="the cat", request_id="own")
        assert [event async for event in client.stream(message)]
    assert generations.requests[0].request_id == "own"


def test_the_client_imports_no_model_tokenizer_or_cluster() -> None:
    heavy = "{'torch', 'ray', 'tokenizers', 'jinja2', 'msgpack', 'numpy'}"
    code = f"import sys, services.client; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
