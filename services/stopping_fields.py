"""When a completion ends, from protobuf: every field checked, every refusal named."""

from collections.abc import Sequence

from protos.paceline.v1 import generation_pb2 as pb
from services.errors import InvalidRequest
from services.sampling_fields import checked_ids
from services.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256


def max_tokens_of(stopping: pb.Stopping, prompt_tokens: int, max_context: int) -> int:
    """The most tokens of the output. Raises InvalidRequest."""
    room = max_context - prompt_tokens
    if not stopping.HasField("max_tokens"):
        return room
    asked, field = stopping.max_tokens, "stopping.max_tokens"
    if asked < 0:
        raise InvalidRequest(field, f"must be 0 or more, is {asked}")
    if asked > room:
        raise InvalidRequest(
            field,
            f"is {asked}; after a prompt of {prompt_tokens} tokens the context of {max_context} "
            f"has room for {room}",
        )
    return asked


def min_tokens_of(stopping: pb.Stopping, max_tokens: int) -> int:
    """How many tokens come before the output may end. Raises InvalidRequest."""
    if not 0 <= stopping.min_tokens <= max_tokens:
        raise InvalidRequest(
            "stopping.min_tokens",
            f"must be in [0, {max_tokens}], the most tokens there can be, is {stopping.min_tokens}",
        )
    return stopping.min_tokens


def stop_ids_of(stopping: pb.Stopping, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids that end the output. Raises InvalidRequest."""
    field = "stopping.stop_token_ids"
    if len(stopping.stop_token_ids) > MAX_STOP_IDS:
        raise InvalidRequest(field, f"may have at most {MAX_STOP_IDS} entries")
    ids = checked_ids(stopping.stop_token_ids, field, tokenizer)
    return tuple(sorted({*ids, *(() if stopping.ignore_eos else tokenizer.eos_ids)}))


def stop_strings_of(strings: Sequence[str]) -> tuple[str, ...]:
    """The texts that end the output. Raises InvalidRequest."""
    field = "stopping.stop_strings"
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(field, f"may have at most {MAX_STOP_STRINGS} entries")
    for i, string in enumerate(strings):
        if not 0 < len(string) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"{field}[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(strings)
