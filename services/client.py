"""An asynchronous client of the public API; imports neither a model nor a tokenizer.

Every call is cancelled in a `finally`, so a caller that stops listening stops the generation.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import grpc

from protos.paceline.v1 import generation_pb2 as pb
from protos.paceline.v1 import generation_pb2_grpc as pb_grpc
from services import errors

Event = pb.Started | pb.PromptScores | pb.Delta | pb.Finished
Prompt = str | Sequence[int] | pb.Chat
ModeName = Literal["off", "sync", "async"]
RuleName = Literal["greedy", "match", "rejection", "sampled", "typical"]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Not more often than the server's `min_ping_s` allows.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_MODES = {
    None: pb.SPECULATION_MODE_UNSPECIFIED,
    "off": pb.SPECULATION_MODE_OFF,
    "sync": pb.SPECULATION_MODE_SYNC,
    "async": pb.SPECULATION_MODE_ASYNC,
}


_RULES = {
    None: pb.RULE_UNSPECIFIED,
    "greedy": pb.RULE_GREEDY,
    "match": pb.RULE_MATCH,
    "rejection": pb.RULE_REJECTION,
    "sampled": pb.RULE_SAMPLED,
    "typical": pb.RULE_TYPICAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to ask for besides the prompt; None leaves the choice to the server.

    The fields are those of `generation.proto`, which says what each may be. At most one of
    `json_schema`, `regex`, `choice`, `grammar` and `any_json` says what the output must be.
    """

    temperature: float | None = None
    seed: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    no_repeat_ngram: int | None = None
    rule: RuleName | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processed_logprobs: bool = False
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    any_json: bool = False
    cache_salt: str = ""
    bypass_cache: bool = False
    mode: ModeName | None = None
    k: int | None = None
    resumed_tokens: tuple[int, ...] = ()
    model: str = ""
    model_revision: str = ""
    request_id: str = ""


def request_of(prompt: Prompt, options: Options) -> pb.GenerateStreamRequest:
    """The request message. Raises InvalidRequest for a value that no such message can hold."""
    try:
        request = pb.GenerateStreamRequest(
            request_id=options.request_id,
            model=options.model,
            model_revision=options.model_revision,
            sampling=_sampling(options),
            stopping=_stopping(options),
            resumed_tokens=options.resumed_tokens,
            speculation=pb.Speculation(mode=_MODES[options.mode], k=options.k),
            prefix_cache=pb.PrefixCache(cache_salt=options.cache_salt, bypass=options.bypass_cache),
            n=options.n,
            scoring=pb.Scoring(
                logprobs=options.logprobs,
                prompt_logprobs=options.prompt_logprobs,
                processed=options.processed_logprobs,
            ),
            structured_output=_structured_output(options),
        )
        if isinstance(prompt, str):
            request.text = prompt
        elif isinstance(prompt, pb.Chat):
            request.chat.CopyFrom(prompt)
        else:
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    except ValueError as error:
        raise errors.InvalidRequest("", str(error)) from error
    return request


class Client:
    """A connection to one server; use it as an async context manager, or close it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection and every stream on it."""
        await self._channel.close()

    def generate_stream(
        self, prompt: Prompt, options: Options | None = None, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Events of one completion. Close it (`contextlib.aclosing`) to stop early.

        Raises RequestFailed: InvalidRequest with its field, Overloaded and Unavailable with
        `retry_s`, and the others of services.errors.
        """
        return self.stream(request_of(prompt, options or Options()), timeout_s=timeout_s)

    async def stream(
        self, request: pb.GenerateStreamRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """As `generate_stream`, for a request message."""
        call = self._stub.GenerateStream(request, timeout=timeout_s)
        try:
            async for response in call:
                yield _event(response)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()

    def _failure(self, error: grpc.aio.AioRpcError) -> errors.RequestFailed:
        if _never_connected(error):
            return errors.Unavailable(
                f"no server answers at {self._address}; start one with `paceline serve`"
            )
        return errors.from_call(error)


def _never_connected(error: grpc.aio.AioRpcError) -> bool:
    """True if no server was reached, which gRPC tells by its wording alone."""
    unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
    return unavailable and "failed to connect" in (error.details() or "")


def _event(response: pb.GenerateStreamResponse) -> Event:
    match response.WhichOneof("event"):
        case "started":
            return response.started
        case "prompt_scores":
            return response.prompt_scores
        case "delta":
            return response.delta
        case "finished":
            return response.finished
        case _:
            raise errors.ServerFault("the server sent an event this client does not know")


def _sampling(options: Options) -> pb.Sampling:
    return pb.Sampling(
        temperature=options.temperature,
        seed=options.seed,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        allowed_token_ids=options.allowed_token_ids,
        no_repeat_ngram=options.no_repeat_ngram,
        rule=_RULES[options.rule],
    )


def _stopping(options: Options) -> pb.Stopping:
    return pb.Stopping(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop_strings=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        include_stop_str_in_output=options.include_stop,
    )


def _structured_output(options: Options) -> pb.StructuredOutput | None:
    """Raises ValueError if several kinds are asked for."""
    kinds = {
        "json_schema": options.json_schema,
        "regex": options.regex,
        "choice": pb.Choice(options=options.choice) if options.choice else None,
        "grammar": options.grammar,
        "json": pb.AnyJson() if options.any_json else None,
    }
    asked = {name: value for name, value in kinds.items() if value is not None}
    if len(asked) > 1:
        raise ValueError(f"an output cannot be of several kinds ({', '.join(asked)}); name one")
    return pb.StructuredOutput(**asked) if asked else None  # type: ignore[arg-type]
