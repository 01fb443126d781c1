"""Protobuf to Request: the only place that checks what a client sends.

Whatever is not supported is refused by name. The core trusts every Request made here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from orchestrator.request import Mode, Request
from protos.messages import Sampling
from protos.paceline.v1 import generation_pb2 as pb
from services.chat import ChatError
from services.config import MAX_K
from services.errors import InvalidRequest, ResumeRefused, UnknownModel
from services.text import make_stopper
from services.tokenizer import Tokenizer

MAX_TEMPERATURE = 10.0
GREEDY_BELOW = 1e-5  # a temperature below this divides scores past float32; it is taken as 0
MAX_ID_CHARS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
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


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets that names no id or seed; new for every request."""

    request_id: str
    seed: int


def request_from(message: pb.GenerateStreamRequest, served: Served, defaults: Defaults) -> Request:
    """The checked request. Raises InvalidRequest, UnknownModel or ResumeRefused."""
    _refuse_unknown_fields(message)
    _refuse_later_fields(message)
    _check_model(message, served)
    prompt = _prompt(message, served)
    request = Request(
        request_id=_request_id(message.request_id) or defaults.request_id,
        prompt=prompt,
        max_tokens=_max_tokens(message.stopping, len(prompt), served.max_context),
        sampling=_sampling(message.sampling, defaults.seed),
        stop_token_ids=_stop_ids(message.stopping, served.tokenizer),
        stop_strings=_stop_strings(message.stopping.stop_strings),
        resumed=_ids(message.resumed_tokens, "resumed_tokens", served.tokenizer),
        mode=_mode(message.speculation),
        k=_k(message.speculation),
        cache_salt=_salt(message.prefix_cache.cache_salt),
        prefix_cache=not message.prefix_cache.bypass,
    )
    if request.resumed:
        _check_resumed(message, request, served.tokenizer)
    return request


def _refuse_unknown_fields(message: pb.GenerateStreamRequest) -> None:
    """A newer client may set fields that mean something; ignoring them would change its answer."""
    parts: dict[str, Message] = {
        "": message,
        "sampling": message.sampling,
        "stopping": message.stopping,
        "speculation": message.speculation,
        "prefix_cache": message.prefix_cache,
        "token_ids": message.token_ids,
        "chat": message.chat,
    }
    parts |= {f"chat.messages[{i}]": each for i, each in enumerate(message.chat.messages)}
    for path, part in parts.items():
        unknown = UnknownFieldSet(part)
        if len(unknown) > 0:
            problem = f"has a field number {unknown[0].field_number} that this server does not know"
            raise InvalidRequest(path, problem if path else f"the request {problem}")


def _refuse_later_fields(message: pb.GenerateStreamRequest) -> None:
    sampling = message.sampling
    neutral = {
        "sampling.top_k": sampling.top_k in (0, -1),
        "sampling.top_p": sampling.top_p == 1 or not sampling.HasField("top_p"),
        "sampling.min_p": sampling.min_p == 0,
        "sampling.presence_penalty": sampling.presence_penalty == 0,
        "sampling.frequency_penalty": sampling.frequency_penalty == 0,
        "sampling.repetition_penalty": sampling.repetition_penalty == 1
        or not sampling.HasField("repetition_penalty"),
        "sampling.logit_bias": not sampling.logit_bias,
        "sampling.allowed_token_ids": not sampling.allowed_token_ids,
        "stopping.min_tokens": message.stopping.min_tokens == 0,
    }
    for field, is_neutral in neutral.items():
        if not is_neutral:
            raise InvalidRequest(field, "is not supported yet; leave it unset")


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
            prompt = _ids(message.token_ids.ids, field, served.tokenizer)
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


def _ids(ids: Iterable[int], field: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    checked = tuple(ids)
    for i, id in enumerate(checked):
        if not 0 <= id < tokenizer.vocab_size:
            raise InvalidRequest(
                f"{field}[{i}]", f"is {id}; token ids go from 0 to {tokenizer.vocab_size - 1}"
            )
    return checked


def _max_tokens(stopping: pb.Stopping, prompt_tokens: int, max_context: int) -> int:
    room = max_context - prompt_tokens
    if not stopping.HasField("max_tokens"):
        return room
    asked, field = stopping.max_tokens, "stopping.max_tokens"
    if asked == 0:
        raise InvalidRequest(field, "of 0 (scoring a prompt) is not supported yet; ask for 1")
    if asked < 0:
        raise InvalidRequest(field, f"must be at least 1, is {asked}")
    if asked > room:
        raise InvalidRequest(
            field,
            f"is {asked}; after a prompt of {prompt_tokens} tokens the context of {max_context} "
            f"has room for {room}",
        )
    return asked


def _sampling(sampling: pb.Sampling, seed: int) -> Sampling:
    temperature = sampling.temperature
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidRequest(
            "sampling.temperature", f"must be in [0, {MAX_TEMPERATURE:g}], is {temperature}"
        )
    if sampling.seed < 0:
        raise InvalidRequest("sampling.seed", f"must be in [0, 2^63), is {sampling.seed}")
    return Sampling(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        seed=sampling.seed if sampling.HasField("seed") else seed,
    )


def _stop_ids(stopping: pb.Stopping, tokenizer: Tokenizer) -> tuple[int, ...]:
    field = "stopping.stop_token_ids"
    if len(stopping.stop_token_ids) > MAX_STOP_IDS:
        raise InvalidRequest(field, f"may have at most {MAX_STOP_IDS} entries")
    ids = _ids(stopping.stop_token_ids, field, tokenizer)
    return tuple(sorted({*ids, *(() if stopping.ignore_eos else tokenizer.eos_ids)}))


def _stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    field = "stopping.stop_strings"
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(field, f"may have at most {MAX_STOP_STRINGS} entries")
    for i, string in enumerate(strings):
        if not 0 < len(string) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"{field}[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(strings)


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
