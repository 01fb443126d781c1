"""What can go wrong at the edge, and the gRPC status each fault becomes.

PacelineError
├── ConfigError               a configuration that cannot work; before anything is started
├── TokenizerError            a model folder whose tokenizer cannot be used; before start
├── ServiceFailed             a bug ended the running service; the process ends with it
└── RequestFailed             a request that ended with a status; raised by server and client alike
    ├── InvalidRequest        INVALID_ARGUMENT      names the field; BadRequest
    ├── UnknownModel          NOT_FOUND
    ├── ResumeRefused         FAILED_PRECONDITION   the model has changed since
    ├── DuplicateRequest      ALREADY_EXISTS        a live request has this id
    ├── Overloaded            RESOURCE_EXHAUSTED    queue full or reader too slow; RetryInfo
    ├── Unavailable           UNAVAILABLE           no target, draining, target lost; RetryInfo
    ├── TimedOut              DEADLINE_EXCEEDED
    ├── Cancelled             CANCELLED
    └── ServerFault           INTERNAL, and every status not named here
"""

from typing import ClassVar, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from orchestrator.request import Finished, FinishReason, Refusal, Refused

DEFAULT_RETRY_S = 1.0


class PacelineError(Exception):
    """Everything the edge raises on purpose."""


class ConfigError(PacelineError):
    """A configuration that cannot work; the message names the key and the remedy."""


class TokenizerError(PacelineError):
    """A model folder whose tokenizer or chat template cannot be used."""


class ServiceFailed(PacelineError):
    """A bug ended the service; the message says what was met, the log where."""


class RequestFailed(PacelineError):
    """A request ended with a status; `retry_s` > 0 says when trying again makes sense."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class InvalidRequest(RequestFailed):
    """The client asked for something that cannot be served; `field` is its path in the request."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}" if field else problem)
        self.field = field
        self.problem = problem


class UnknownModel(RequestFailed):
    """No model of that name is served."""

    code = grpc.StatusCode.NOT_FOUND


class ResumeRefused(RequestFailed):
    """The output could not continue what the client already has."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class DuplicateRequest(RequestFailed):
    """A live request has the same id."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Overloaded(RequestFailed):
    """A bound was reached: of the queue or of what waits for a slow reader."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(RequestFailed):
    """Nothing can serve the request now."""

    code = grpc.StatusCode.UNAVAILABLE


class TimedOut(RequestFailed):
    """The request took longer than the client or the server allows."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(RequestFailed):
    """The request was cancelled."""

    code = grpc.StatusCode.CANCELLED


class ServerFault(RequestFailed):
    """Something broke that is not the client's doing."""

    code = grpc.StatusCode.INTERNAL


_BY_CODE = {
    kind.code: kind
    for kind in (
        UnknownModel,
        ResumeRefused,
        DuplicateRequest,
        Overloaded,
        Unavailable,
        TimedOut,
        Cancelled,
        ServerFault,
    )
}


def of_refusal(refused: Refused) -> RequestFailed:
    """Why a request was not taken, as the error its client gets."""
    retry_s = refused.retry_s or DEFAULT_RETRY_S
    match refused.refusal:
        case Refusal.QUEUE_FULL:
            return Overloaded(refused.detail, retry_s=retry_s)
        case Refusal.DUPLICATE:
            return DuplicateRequest(refused.detail)
        case Refusal.NO_TARGET | Refusal.DRAINING:
            return Unavailable(refused.detail, retry_s=retry_s)
        case Refusal.TOO_LARGE:
            return InvalidRequest("", refused.detail)


def of_finish(finished: Finished) -> RequestFailed | None:
    """The error a stream ends with, or None if the completion is complete."""
    match finished.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.TIMEOUT:
            return TimedOut(finished.error or "the request took longer than the server allows")
        case FinishReason.CANCELLED:
            return Cancelled(finished.error or "the request was cancelled")
        case FinishReason.UNAVAILABLE:
            return Unavailable(finished.error or "the target was lost", retry_s=DEFAULT_RETRY_S)
        case FinishReason.ERROR:
            return ServerFault(finished.error or "the target failed on this request")


def to_status(error: RequestFailed) -> grpc.Status:
    """The status, with google.rpc details, that `from_call` turns back into the same error."""
    number, _ = error.code.value
    status = Status(code=number, message=str(error))
    if isinstance(error, InvalidRequest):
        violation = BadRequest.FieldViolation(field=error.field, description=error.problem)
        status.details.append(_packed(BadRequest(field_violations=[violation])))
    if error.retry_s > 0:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_s * 1e9))
        status.details.append(_packed(retry))
    return rpc_status.to_status(status)


def from_call(call: grpc.aio.AioRpcError) -> RequestFailed:
    """The error behind a failed call."""
    bad, retry = BadRequest(), RetryInfo()
    status = rpc_status.from_call(cast(grpc.Call, call))  # it has what is needed of one
    for detail in status.details if status is not None else ():
        detail.Unpack(bad) or detail.Unpack(retry)
    message = call.details() or call.code().name
    if call.code() is grpc.StatusCode.INVALID_ARGUMENT:
        for violation in bad.field_violations:
            return InvalidRequest(violation.field, violation.description)
        return InvalidRequest("", message)
    if _is_too_large(call):
        return InvalidRequest("", f"the message is too large ({message}); send a shorter prompt")
    kind = _BY_CODE.get(call.code())
    if kind is None:
        return ServerFault(f"{call.code().name}: {message}")
    return kind(message, retry_s=retry.retry_delay.ToNanoseconds() / 1e9)


def _is_too_large(call: grpc.aio.AioRpcError) -> bool:
    """True if gRPC refused a message for its size, which it tells by its wording alone."""
    is_exhausted = call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return is_exhausted and "message larger than max" in (call.details() or "")


def _packed(detail: BadRequest | RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
