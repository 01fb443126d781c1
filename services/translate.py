"""Protobuf to Request: the only place that checks what a client sends.

Whatever is not supported is refused by name. The core trusts every Request made here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from orchestrator.request import Mode, Request
from protos.paceline.v1 import generation_pb2 as pb
from services.chat import ChatError
from services.config import MAX_K
from services.errors import InvalidRequest, ResumeRefused, UnknownModel
from services.sampling_fields import (
    checked_ids,
    choice_seed,
    choices_of,
    processors_of,
    sampling_of,
    scoring_of,
)
from services.stopping_fields import max_tokens_of, min_tokens_of, stop_ids_of, stop_strings_of
from services.structure import structured
from services.text import make_stopper
from services.tokenizer import Tokenizer

MAX_ID_CHARS = 128
MAX_SALT_CHARS = 256
ROLES = ("system", "user", "assistant")

_MODES = {
    pb.SPECULATION_MODE_UNSPECIFIED: None,
    pb.SPECULATION_MODE_OFF: Mode.OFF,
    pb.SPECULATION_MODE_SYNC: Mode.SYNC,
    pb.SPECULATION_MODE_ASYNC: Mode.ASYNC,
}


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are checked against. `max_context` counts prompt and output tokens."""

    name: str
    revision: str
    max_context: int
    tokenizer: Tokenizer
    allow_lossy: bool = False


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets that names no id or seed; new for every request."""

    request_id: str
    seed: int


def requests_from(
    message: pb.GenerateStreamRequest, served: Served, defaults: Defaults
) -> tuple[Request, ...]:
    """The checked request, one for each choice; the others begin with the first one's rows.

    Raises InvalidRequest, UnknownModel or ResumeRefused.
    """
    first = _first_choice(message, served, defaults)
    others = (
        replace(
            first,
            request_id=f"{first.request_id}#{i}",
            sampling=replace(first.sampling, seed=choice_seed(first.sampling.seed, i)),
            scoring=replace(first.scoring, prompt=-1),
            parent=first.request_id,
        )
        for i in range(1, choices_of(message))
    )
    return first, *others


def _first_choice(message: pb.GenerateStreamRequest, served: Served, defaults: Defaults) -> Request:
    _refuse_unknown_fields(message)
    _check_model(message, served)
    prompt = _prompt(message, served)
    max_tokens = max_tokens_of(message.stopping, len(prompt), served.max_context)
    stop_ids = stop_ids_of(message.stopping, served.tokenizer)
    processors = processors_of(
        message.sampling, min_tokens_of(message.stopping, max_tokens), stop_ids, served.tokenizer
    )
    scoring = scoring_of(message.scoring)
    request = Request(
        request_id=_request_id(message.request_id) or defaults.request_id,
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling_of(message.sampling, defaults.seed, len(prompt), processors),
        stop_token_ids=stop_ids,
        stop_strings=stop_strings_of(message.stopping.stop_strings),
        resumed=checked_ids(message.resumed_tokens, "resumed_tokens", served.tokenizer),
        mode=_mode(message.speculation),
        k=_k(message.speculation),
        cache_salt=_salt(message.prefix_cache.cache_salt),
        # Rows that are found are not computed, and so have no logits to score the prompt by.
        prefix_cache=not message.prefix_cache.bypass and scoring.prompt < 0,
        scoring=scoring,
    )
    _check_rule(request, served)
    if request.resumed:
        _check_resumed(message, request, served.tokenizer)
    return structured(request, message, served.tokenizer)


def _check_rule(request: Request, served: Served) -> None:
    rule = request.sampling.rule
    if rule == "typical" and not served.allow_lossy:
        raise InvalidRequest(
            "sampling.rule",
            "typical is not the target's distribution, and this server does not allow it "
            "(speculation.allow_lossy)",
        )
    if rule != "match" and request.resumed:
        raise ResumeRefused(
            f"under rule {rule} tokens depend on the guesses, so that no stream can go on from "
            "them; start anew, or use rule match"
        )


def _refuse_unknown_fields(message: pb.GenerateStreamRequest) -> None:
    """A newer client may set fields that mean something; ignoring them would change its answer."""
    for path, part in _parts(message):
        unknown = UnknownFieldSet(part)
        if len(unknown) > 0:
            problem = f"has a field number {unknown[0].field_number} that this server does not know"
            raise InvalidRequest(path, problem if path else f"the request {problem}")


def _parts(message: Message, path: str = "") -> Iterator[tuple[str, Message]]:
    """A message and all that are set within it, with their paths."""
    yield path, message
    below = f"{path}." if path else ""
    for field, value in message.ListFields():
        if isinstance(value, Message):
            yield from _parts(value, below + field.name)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for i, each in enumerate(value):
                yield from _parts(each, f"{below}{field.name}[{i}]")


def _check_model(message: pb.GenerateStreamRequest, served: Served) -> None:
    if message.model not in ("", served.name):
        raise UnknownModel(f"no model {message.model[:MAX_ID_CHARS]!r}; served is {served.name!r}")
    if message.model_revision not in ("", served.revision):
        raise ResumeRefused(
            f"the served model's revision is {served.revision!r}, another than model_revision; "
            "start anew"
        )


def _request_id(id: str) -> str:
    if len(id) > MAX_ID_CHARS or not id.isprintable():
        raise InvalidRequest("request_id", f"must be at most {MAX_ID_CHARS} printable characters")
    return id


def _prompt(message: pb.GenerateStreamRequest, served: Served) -> tuple[int, ...]:
    match message.WhichOneof("prompt"):
        case "text":
            field, prompt = "text", _encode_text(message.text, served)
        case "token_ids":
            field = "token_ids.ids"
            prompt = checked_ids(message.token_ids.ids, field, served.tokenizer)
        case "chat":
            field, prompt = "chat.messages", _encode_chat(message.chat, served)
        case _:
            raise InvalidRequest("prompt", "is missing; set text, token_ids or chat")
    if not prompt:
        raise InvalidRequest(field, "is empty; the model needs at least one token to go on from")
    if len(prompt) >= served.max_context:
        raise InvalidRequest(
            field,
            f"has {len(prompt)} tokens, which leaves no room to generate in the context of "
            f"{served.max_context}",
        )
    return prompt


def _encode_text(text: str, served: Served) -> tuple[int, ...]:
    _check_size(text, "text", served)
    return served.tokenizer.encode(text) if text else ()


def _encode_chat(chat: pb.Chat, served: Served) -> tuple[int, ...]:
    for i, each in enumerate(chat.messages):
        if each.role not in ROLES:
            raise InvalidRequest(f"chat.messages[{i}].role", f"must be one of {', '.join(ROLES)}")
    if not chat.messages:
        return ()
    _check_size("".join(each.content for each in chat.messages), "chat.messages", served)
    messages = [{"role": each.role, "content": each.content} for each in chat.messages]
    try:
        return served.tokenizer.encode_chat(messages)
    except ChatError as error:
        raise InvalidRequest("chat.messages", str(error)) from error


def _check_size(text: str, field: str, served: Served) -> None:
    """Refuse what cannot fit before spending time on encoding it."""
    most = served.max_context * served.tokenizer.max_piece_bytes
    size = len(text.encode())
    if size > most:
        raise InvalidRequest(
            field,
            f"has {size} bytes; the context of {served.max_context} tokens holds at most {most}",
        )


def _mode(speculation: pb.Speculation) -> Mode | None:
    if speculation.mode not in _MODES:
        raise InvalidRequest("speculation.mode", f"is {speculation.mode}, which is no mode")
    return _MODES[speculation.mode]


def _k(speculation: pb.Speculation) -> int | None:
    if not speculation.HasField("k"):
        return None
    if not 1 <= speculation.k <= MAX_K:
        raise InvalidRequest(
            "speculation.k",
            f"must be 1 to {MAX_K}, is {speculation.k}; mode OFF is without guesses",
        )
    return speculation.k


def _salt(salt: str) -> str:
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest(
            "prefix_cache.cache_salt", f"may have at most {MAX_SALT_CHARS} characters"
        )
    return salt


def _check_resumed(
    message: pb.GenerateStreamRequest, request: Request, tokenizer: Tokenizer
) -> None:
    field = "resumed_tokens"
    if len(request.resumed) >= request.max_tokens:
        raise InvalidRequest(
            field,
            f"has {len(request.resumed)} of at most {request.max_tokens} tokens; none is left to "
            "generate",
        )
    if request.sampling.temperature > 0 and not message.sampling.HasField("seed"):
        raise InvalidRequest("sampling.seed", "must be that of the stream which is resumed")
    stopper = make_stopper(tokenizer, replace(request, resumed=()))
    for i, token in enumerate(request.resumed):
        if stopper.push(token):
            raise InvalidRequest(f"{field}[{i}]", "ended the sequence; there is nothing to resume")
