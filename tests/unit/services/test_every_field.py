"""No field of a request is ignored, none is out of the client's reach, none is lost on the way.

All by the descriptor: a new field fails here until it is served, offered and told.
"""

import dataclasses
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.request import Request
from protos.paceline.v1 import generation_pb2 as pb
from protos.sampling import PLAIN
from services.client import Options, request_of
from services.errors import InvalidRequest, RequestFailed
from services.replies import started
from services.translate import Defaults, Served, requests_from

Json = dict[str, object]
PROMPTS = ("text", "token_ids.ids", "chat.messages.role", "chat.messages.content")
PLAIN_REQUEST: Json = {"text": "the cat", "sampling": {"temperature": 0.5, "seed": 1}}

# For every field a request that sets it to what changes the answer, and what else that needs.
SET: dict[str, Json] = {
    "request_id": {"request_id": "mine"},
    "model": {"model": "other"},
    "model_revision": {"model_revision": "r0"},
    "text": {"text": "the dog"},
    "token_ids.ids": {"token_ids": {"ids": [9]}},
    "chat.messages.role": {"chat": {"messages": [{"role": "assistant"}]}},
    "chat.messages.content": {"chat": {"messages": [{"role": "user", "content": "hi"}]}},
    "sampling.temperature": {"sampling": {"temperature": 0.6}},
    "sampling.seed": {"sampling": {"seed": 2}},
    "sampling.top_k": {"sampling": {"top_k": 5}},
    "sampling.top_p": {"sampling": {"top_p": 0.5}},
    "sampling.min_p": {"sampling": {"min_p": 0.5}},
    "sampling.presence_penalty": {"sampling": {"presence_penalty": 1.5}},
    "sampling.frequency_penalty": {"sampling": {"frequency_penalty": -1.5}},
    "sampling.repetition_penalty": {"sampling": {"repetition_penalty": 1.5}},
    "sampling.logit_bias": {"sampling": {"logit_bias": {"5": -100.0}}},
    "sampling.allowed_token_ids": {"sampling": {"allowed_token_ids": [6, 5]}},
    "sampling.no_repeat_ngram": {"sampling": {"no_repeat_ngram": 3}},
    "sampling.rule": {"sampling": {"rule": "RULE_REJECTION"}},
    "stopping.max_tokens": {"stopping": {"max_tokens": 5}},
    "stopping.stop_strings": {"stopping": {"stop_strings": ["x"]}},
    "stopping.stop_token_ids": {"stopping": {"stop_token_ids": [30]}},
    "stopping.ignore_eos": {"stopping": {"ignore_eos": True}},
    "stopping.include_stop_str_in_output": {"stopping": {"include_stop_str_in_output": True}},
    "stopping.min_tokens": {"stopping": {"min_tokens": 2}},
    "resumed_tokens": {"resumed_tokens": [40]},
    "speculation.mode": {"speculation": {"mode": "SPECULATION_MODE_OFF"}},
    "speculation.k": {"speculation": {"k": 3}},
    "prefix_cache.cache_salt": {"prefix_cache": {"cache_salt": "x"}},
    "prefix_cache.bypass": {"prefix_cache": {"bypass": True}},
    "n": {"n": 2},
    "scoring.logprobs": {"scoring": {"logprobs": 0}},
    "scoring.prompt_logprobs": {"scoring": {"prompt_logprobs": 2}},
    "scoring.processed": {"scoring": {"processed": True}},
    "structured_output.json_schema": {"structured_output": {"json_schema": "true"}},
    "structured_output.regex": {"structured_output": {"regex": "a+"}},
    "structured_output.choice.options": {"structured_output": {"choice": {"options": ["a"]}}},
    "structured_output.grammar": {"structured_output": {"grammar": 'start: "a"'}},
    "structured_output.json": {"structured_output": {"json": {}}},
}
NEEDS: dict[str, Json] = {
    "chat.messages.role": {"chat": {"messages": [{"role": "user"}]}},
    "chat.messages.content": {"chat": {"messages": [{"role": "user"}]}},
    "scoring.processed": {"scoring": {"logprobs": 1}},
}
# Not the orchestrator's business: test_replies and test_server show that it is done.
DONE_BY_THE_EDGE = {"stopping.include_stop_str_in_output"}

# Every option of the client, set to what only it can set.
OPTIONS: Json = {
    "temperature": 0.5,
    "seed": 1,
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 2.0,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": (5,),
    "no_repeat_ngram": 2,
    "rule": "match",
    "max_tokens": 5,
    "min_tokens": 1,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "include_stop": True,
    "ignore_eos": True,
    "n": 2,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "processed_logprobs": True,
    "json_schema": "true",
    "regex": "a",
    "choice": ("a",),
    "grammar": "start: /a/",
    "any_json": True,
    "cache_salt": "x",
    "bypass_cache": True,
    "mode": "off",
    "k": 2,
    "resumed_tokens": (5,),
    "model": "m",
    "model_revision": "r",
    "request_id": "i",
}


def leaves(kind: Descriptor, path: str = "") -> Iterator[str]:
    """The paths of all fields of a message and of those within it; an empty message is one too."""
    for field in kind.fields:
        inner = field.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        if inner is None or is_map or not inner.fields:
            yield path + field.name
        else:
            yield from leaves(inner, f"{path}{field.name}.")


def set_leaves(message: Message, path: str = "") -> Iterator[str]:
    """The paths of what is set in a message."""
    for field, value in message.ListFields():
        inner = field.message_type
        if not isinstance(value, Message) or inner is None or not inner.fields:
            yield path + field.name
        else:
            yield from set_leaves(value, f"{path}{field.name}.")


EVERY = sorted(leaves(pb.GenerateStreamRequest.DESCRIPTOR))


def answer(served: Served, *parts: Json) -> tuple[Request, ...] | str:
    """What the orchestrator is asked, or why it is not: later parts go over earlier ones."""
    message = pb.GenerateStreamRequest()
    for part in parts:
        if part.keys() & {"text", "token_ids", "chat"}:
            for prompt in ("text", "token_ids", "chat"):
                message.ClearField(prompt)
        ParseDict(part, message)
    try:
        return requests_from(message, served, Defaults("given", 99))
    except RequestFailed as failed:
        return f"{type(failed).__name__}: {failed}"


def test_the_tables_here_are_complete() -> None:
    assert sorted(SET) == EVERY
    assert set(OPTIONS) == {field.name for field in dataclasses.fields(Options)}


@pytest.mark.parametrize("path", EVERY)
def test_no_field_is_ignored(served: Served, path: str) -> None:
    needs = NEEDS.get(path, {})
    before, after = (
        answer(served, PLAIN_REQUEST, needs),
        answer(served, PLAIN_REQUEST, needs, SET[path]),
    )
    assert isinstance(before, tuple)
    if path not in DONE_BY_THE_EDGE:
        assert after != before
    if isinstance(after, str):
        assert path in ("model", "model_revision"), after


def message_paths(kind: Descriptor, path: str = "") -> Iterator[str]:
    """The paths of all messages within a message."""
    for field in kind.fields:
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield path + field.name
            yield from message_paths(inner, f"{path}{field.name}.")


def holding(message: pb.GenerateStreamRequest, path: str) -> Message:
    """The message at a path, there from now on; a new one at the end of a list."""
    here: Message = message
    for name in path.split("."):
        value = getattr(here, name)
        here = value if isinstance(value, Message) else value.add()
        here.SetInParent()
    return here


@pytest.mark.parametrize("path", sorted(message_paths(pb.GenerateStreamRequest.DESCRIPTOR)))
def test_a_newer_clients_field_is_refused_wherever_it_is(served: Served, path: str) -> None:
    message = pb.GenerateStreamRequest()
    holding(message, path).MergeFromString(bytes([0x98, 0x06, 0x01]))  # field 99 as a varint
    with pytest.raises(InvalidRequest, match="99") as caught:
        requests_from(message, served, Defaults("given", 99))
    assert caught.value.field.replace("[0]", "") == path


def test_the_client_can_ask_for_every_field() -> None:
    """Each option sets one field, and together they set all."""
    asked = set()
    for name, value in OPTIONS.items():
        paths = {*set_leaves(request_of("x", Options(**{name: value})))} - {"text"}  # type: ignore[arg-type]
        assert len(paths) == 1, name
        asked |= paths
    assert asked == set(EVERY) - set(PROMPTS)


@pytest.mark.parametrize("more", ["regex", "choice", "grammar", "any_json"])
def test_the_client_asks_for_one_kind_of_output(more: str) -> None:
    kinds = {"json_schema": "true", more: OPTIONS[more]}
    with pytest.raises(InvalidRequest, match="several kinds"):
        request_of("x", Options(**kinds))  # type: ignore[arg-type]


ids = st.integers(0, 384)
fractions = st.floats(0, 1)
chosen = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 10),
        "seed": st.integers(0, 2**63 - 1),
        "top_k": st.integers(-1, 400),
        "top_p": st.floats(0, 1, exclude_min=True),
        "min_p": fractions,
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0, 10, exclude_min=True),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=4),
        "allowed_token_ids": st.lists(ids, max_size=4).map(tuple),
        "no_repeat_ngram": st.just(0) | st.integers(2, 64),
        "rule": st.sampled_from(["match", "rejection", "sampled", "typical"]),
    },
)


@settings(max_examples=100)
@given(chosen)
def test_what_is_told_asks_for_the_same_again(served: Served, options: Json) -> None:
    """A client that sends back `started.sampling` has its tokens chosen in the same way."""
    lossy = dataclasses.replace(served, allow_lossy=True)
    message = request_of("the cat", Options(**options))  # type: ignore[arg-type]
    (first,) = requests_from(message, lossy, Defaults("given", 99))
    told = started([first], lossy).started
    arrived = pb.Started.FromString(told.SerializeToString())
    again = pb.GenerateStreamRequest(text="the cat", sampling=arrived.sampling)
    (second,) = requests_from(again, lossy, Defaults("given", 1))
    assert second == first
    set_ = {field.name for field, _ in arrived.sampling.ListFields()}
    lists = {"logit_bias", "allowed_token_ids"}
    assert {field.name for field in pb.Sampling.DESCRIPTOR.fields} - set_ <= lists


def test_a_request_that_asks_for_nothing_pays_for_nothing(served: Served) -> None:
    (bare,) = requests_from(request_of("the cat", Options()), served, Defaults("given", 99))
    assert bare.sampling.processors == PLAIN
    assert bare.sampling.prompt_tokens == len(bare.prompt)
