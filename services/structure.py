"""What an output must be, from protobuf: checked by what follows it, every refusal named."""

from dataclasses import replace

from orchestrator.request import Request
from protos.paceline.v1 import generation_pb2 as pb
from services import grammar
from services.errors import InvalidRequest
from services.tokenizer import Tokenizer

FIELD = "structured_output"


def structured(
    request: Request, message: pb.GenerateStreamRequest, tokenizer: Tokenizer
) -> Request:
    """The request with the grammar that the message asks for, if any. Raises InvalidRequest.

    A grammar that was not asked for lately is tried first, which takes a while.
    """
    if not message.HasField(FIELD):
        return request
    if message.stopping.ignore_eos:
        raise InvalidRequest(
            "stopping.ignore_eos",
            f"goes on for ever after an output that {FIELD} completes; leave one of them out",
        )
    if not tokenizer.eos_ids:
        raise InvalidRequest(FIELD, "needs a model with an end token; leave it unset")
    processors = replace(request.sampling.processors, grammar=_grammar(message.structured_output))
    return replace(request, sampling=replace(request.sampling, processors=processors))


def _grammar(asked: pb.StructuredOutput) -> str:
    kind = asked.WhichOneof("kind")
    try:
        match kind:
            case "json_schema":
                return grammar.json_grammar(asked.json_schema)
            case "regex":
                return grammar.regex_grammar(asked.regex)
            case "choice":
                return grammar.choice_grammar(asked.choice.options)
            case "grammar":
                return grammar.lark_grammar(asked.grammar)
            case "json":
                return grammar.ANY_JSON
            case _:
                raise InvalidRequest(
                    FIELD, "is empty; set json_schema, regex, choice, grammar or json"
                )
    except ValueError as error:
        raise InvalidRequest(f"{FIELD}.{kind}", f"cannot be served: {error}") from error
