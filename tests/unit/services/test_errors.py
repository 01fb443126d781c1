"""Every end of a request has its status, and a status becomes the same error at the client."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from orchestrator.request import Finished, FinishReason, Refusal, Refused, Stats
from services.errors import (
    Cancelled,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    ResumeRefused,
    ServerFault,
    TimedOut,
    Unavailable,
    UnknownModel,
    from_call,
    of_finish,
    of_refusal,
    to_status,
)

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("refusal", "kind", "code", "retries"),
    [
        (Refusal.QUEUE_FULL, Overloaded, Code.RESOURCE_EXHAUSTED, True),
        (Refusal.DUPLICATE, DuplicateRequest, Code.ALREADY_EXISTS, False),
        (Refusal.NO_TARGET, Unavailable, Code.UNAVAILABLE, True),
        (Refusal.DRAINING, Unavailable, Code.UNAVAILABLE, True),
        (Refusal.TOO_LARGE, InvalidRequest, Code.INVALID_ARGUMENT, False),
    ],
)
def test_refusals_have_their_status(
    refusal: Refusal, kind: type[RequestFailed], code: Code, retries: bool
) -> None:
    error = of_refusal(Refused(refusal, "because"))
    assert type(error) is kind
    assert error.code is code
    assert str(error) == "because"
    assert (error.retry_s > 0) == retries


def test_the_orchestrators_retry_time_is_kept() -> None:
    assert of_refusal(Refused(Refusal.QUEUE_FULL, "full", retry_s=2.5)).retry_s == 2.5


def test_every_refusal_and_reason_is_mapped() -> None:
    for refusal in Refusal:
        assert isinstance(of_refusal(Refused(refusal, "x")), RequestFailed)
    complete = [r for r in FinishReason if of_finish(Finished(r, Stats())) is None]
    assert complete == [FinishReason.STOP, FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FinishReason.TIMEOUT, Code.DEADLINE_EXCEEDED),
        (FinishReason.CANCELLED, Code.CANCELLED),
        (FinishReason.UNAVAILABLE, Code.UNAVAILABLE),
        (FinishReason.ERROR, Code.INTERNAL),
    ],
)
def test_unfinished_completions_end_with_a_status(reason: FinishReason, code: Code) -> None:
    error = of_finish(Finished(reason, Stats(), "the cause"))
    assert error is not None
    assert error.code is code
    assert str(error) == "the cause"
    unnamed = of_finish(Finished(reason, Stats()))
    assert unnamed is not None
    assert str(unnamed) != ""


def as_seen_by_client(error: RequestFailed) -> RequestFailed:
    status = to_status(error)
    trailers = Metadata(*status.trailing_metadata)
    return from_call(AioRpcError(status.code, Metadata(), trailers, status.details))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("sampling.top_p", "is not supported"),
        InvalidRequest("", "the request is too large"),
        UnknownModel("no model 'x'"),
        ResumeRefused("another revision"),
        DuplicateRequest("request 'r' is being served"),
        Overloaded("the queue is full", retry_s=1.25),
        Unavailable("draining"),
        TimedOut("too long"),
        Cancelled("gone"),
        ServerFault("NaN in the logits of 안녕"),
    ],
)
def test_the_client_gets_the_error_the_server_raised(error: RequestFailed) -> None:
    seen = as_seen_by_client(error)
    assert type(seen) is type(error)
    assert str(seen) == str(error)
    assert seen.retry_s == error.retry_s
    if isinstance(error, InvalidRequest):
        assert isinstance(seen, InvalidRequest)
        assert (seen.field, seen.problem) == (error.field, error.problem)


def test_a_status_without_details_is_understood_too() -> None:
    def seen(code: Code, details: str) -> RequestFailed:
        return from_call(AioRpcError(code, Metadata(), Metadata(), details))

    assert isinstance(seen(Code.INVALID_ARGUMENT, "bad"), InvalidRequest)
    assert isinstance(seen(Code.UNAVAILABLE, ""), Unavailable)
    large = seen(Code.RESOURCE_EXHAUSTED, "CLIENT: Sent message larger than max (20 vs. 16)")
    assert isinstance(large, InvalidRequest) and "shorter prompt" in str(large)
    assert isinstance(seen(Code.RESOURCE_EXHAUSTED, "the queue is full"), Overloaded)
    other = seen(Code.UNIMPLEMENTED, "no such method")
    assert isinstance(other, ServerFault)
    assert str(other) == "UNIMPLEMENTED: no such method"
