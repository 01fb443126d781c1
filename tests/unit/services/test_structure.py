"""Structured output at the edge: every kind becomes a grammar, or is refused by its field."""

from dataclasses import replace

import pytest

from protos.paceline.v1 import generation_pb2 as pb
from services.errors import InvalidRequest
from services.grammar import (
    ANY_JSON,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from services.translate import Defaults, Served, requests_from

SCHEMA = '{"type": "integer"}'
LARK = 'start: "yes" | "no"'


def message(asked: pb.StructuredOutput, **fields: object) -> pb.GenerateStreamRequest:
    prompt = pb.TokenIds(ids=[10, 11])
    return pb.GenerateStreamRequest(token_ids=prompt, structured_output=asked, **fields)  # type: ignore[arg-type]


def grammar_of(served: Served, request: pb.GenerateStreamRequest) -> str:
    (made,) = requests_from(request, served, Defaults("given", 1))
    return made.sampling.processors.grammar


def refusal(served: Served, request: pb.GenerateStreamRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(served, request)
    return caught.value


KINDS = [
    (pb.StructuredOutput(json_schema=SCHEMA), json_grammar(SCHEMA)),
    (pb.StructuredOutput(regex="[ab]+"), regex_grammar("[ab]+")),
    (pb.StructuredOutput(choice=pb.Choice(options=["a", "b"])), choice_grammar(["a", "b"])),
    (pb.StructuredOutput(grammar=LARK), lark_grammar(LARK)),
    (pb.StructuredOutput(json=pb.AnyJson()), ANY_JSON),
]


@pytest.mark.parametrize(("asked", "grammar"), KINDS)
def test_each_kind_becomes_its_grammar(
    served: Served, asked: pb.StructuredOutput, grammar: str
) -> None:
    assert grammar_of(served, message(asked)) == grammar


def test_no_kind_is_left_out_here() -> None:
    kinds = {asked.WhichOneof("kind") for asked, _ in KINDS}
    assert kinds == {field.name for field in pb.StructuredOutput.DESCRIPTOR.fields}
    assert len({grammar for _, grammar in KINDS}) == len(KINDS)


def test_nothing_asked_for_is_no_grammar(served: Served) -> None:
    plain = pb.GenerateStreamRequest(token_ids=pb.TokenIds(ids=[10, 11]))
    assert grammar_of(served, plain) == ""


@pytest.mark.parametrize(
    ("asked", "field", "cause"),
    [
        (pb.StructuredOutput(), "structured_output", "set json_schema, regex"),
        (pb.StructuredOutput(json_schema="{"), "structured_output.json_schema", "not JSON"),
        (pb.StructuredOutput(json_schema=""), "structured_output.json_schema", "not JSON"),
        (
            pb.StructuredOutput(json_schema='{"type": "integer", "minimum": 2, "maximum": 1}'),
            "structured_output.json_schema",
            "correct it",
        ),
        (pb.StructuredOutput(regex="(a"), "structured_output.regex", "correct it"),
        (pb.StructuredOutput(regex="a" * 32_769), "structured_output.regex", "shorten it"),
        (pb.StructuredOutput(choice=pb.Choice()), "structured_output.choice", "at least one"),
        (pb.StructuredOutput(grammar="start: nowhere"), "structured_output.grammar", "correct it"),
        (pb.StructuredOutput(grammar=""), "structured_output.grammar", "correct it"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_kind(
    served: Served, asked: pb.StructuredOutput, field: str, cause: str
) -> None:
    error = refusal(served, message(asked))
    assert error.field == field
    assert cause in error.problem


def test_an_output_that_has_an_end_needs_an_end_token(served: Served) -> None:
    asked = pb.StructuredOutput(json=pb.AnyJson())
    endless = message(asked, stopping=pb.Stopping(ignore_eos=True))
    assert refusal(served, endless).field == "stopping.ignore_eos"
    without = replace(served, tokenizer=replace(served.tokenizer, eos_ids=()))
    assert refusal(without, message(asked)).field == "structured_output"


def test_cheap_checks_come_before_the_trial_of_a_grammar(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untouchable(text: str) -> str:
        raise AssertionError("a trial takes long")

    monkeypatch.setattr("services.grammar.regex_grammar", untouchable)
    asked = pb.StructuredOutput(regex="a+")
    late = message(asked, resumed_tokens=[30], stopping=pb.Stopping(max_tokens=1))
    assert refusal(served, late).field == "resumed_tokens"


def test_every_choice_has_the_grammar(served: Served) -> None:
    asked = message(pb.StructuredOutput(json=pb.AnyJson()), n=3)
    made = requests_from(asked, served, Defaults("given", 1))
    assert [each.sampling.processors.grammar for each in made] == [ANY_JSON] * 3


def test_a_newer_kind_is_refused(served: Served) -> None:
    for part, path in (("choice", "structured_output.choice"), ("json", "structured_output.json")):
        request = message(pb.StructuredOutput())
        kind = getattr(request.structured_output, part)
        kind.SetInParent()
        kind.MergeFromString(bytes([0x98, 0x06, 0x01]))  # field 99 as a varint
        assert refusal(served, request).field == path
    request = message(pb.StructuredOutput())
    request.structured_output.MergeFromString(bytes([0x98, 0x06, 0x01]))
    assert refusal(served, request).field == "structured_output"
