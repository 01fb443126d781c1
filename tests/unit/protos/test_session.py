"""The worker's end of a stream, over loopback gRPC, against peers that misbehave."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import msgpack
import pytest

from protos.codec import encode
from protos.engine_thread import EngineThread, LinkLimits
from protos.frames import MAX_PAYLOAD_BYTES, pack, unpack
from protos.messages import Audit, AuditReply, Hello, Open
from protos.sampling import GREEDY
from protos.session import METHOD, SECRET_KEY, SERVICE, SessionServer
from tests.fakes import BROKEN, WRONG, ToyEngine

WAIT_S = 5.0
SECRET = "open sesame"
Call = grpc.aio.StreamStreamCall[bytes, bytes]


class Watched(ToyEngine):
    """A toy engine whose reset can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.was_reset = threading.Event()

    def reset(self) -> None:
        super().reset()
        self.was_reset.set()


@pytest.fixture
def engine() -> Watched:
    return Watched()


@pytest.fixture
async def address(engine: ToyEngine) -> AsyncIterator[str]:
    limits = LinkLimits()
    thread = EngineThread(lambda: engine, limits)
    server = SessionServer(thread, SECRET, limits)
    yield await server.start("127.0.0.1")
    await server.stop()
    assert await asyncio.to_thread(thread.stop)


@asynccontextmanager
async def call_to(address: str, secret: str | None = SECRET) -> AsyncIterator[Call]:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        metadata = () if secret is None else ((SECRET_KEY, secret),)
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE}/{METHOD}"
        )
        call = method(metadata=metadata)
        async with asyncio.timeout(WAIT_S):
            yield call
        call.cancel()


async def hear(call: Call) -> object:
    payload = await call.read()
    assert isinstance(payload, bytes)
    (message,) = unpack(payload)
    return message


async def end_of(call: Call) -> str:
    """The status that ends a call, whatever comes before it."""
    try:
        while isinstance(await call.read(), bytes):
            pass
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


async def test_a_session_begins_with_hello_and_answers(address: str) -> None:
    async with call_to(address) as call:
        assert isinstance(await hear(call), Hello)
        await call.write(next(pack([Audit(1)])))
        assert await hear(call) == AuditReply(1, 8, 8, 0)


@pytest.mark.parametrize("secret", ["close sesame", "", None])
async def test_a_peer_without_the_secret_is_refused(address: str, secret: str | None) -> None:
    async with call_to(address, secret) as call:
        assert await end_of(call) == "UNAUTHENTICATED: wrong secret"


async def test_a_refused_peer_does_not_disturb_the_session(address: str) -> None:
    async with call_to(address) as call, call_to(address, "wrong") as stranger:
        assert isinstance(await hear(call), Hello)
        await end_of(stranger)
        await call.write(next(pack([Audit(2)])))
        assert await hear(call) == AuditReply(2, 8, 8, 0)


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (b"", "an empty payload"),
        (b"\x00\x00\x00\x09\x92", "a frame of 9 bytes is cut at 1"),
        (b"\x00\x00\x00\x01\xc1", "not msgpack"),
        (b"\x00\x00\x00\x02" + msgpack.packb([77]), "unknown tag"),
    ],
)
async def test_a_bad_frame_ends_the_session_with_its_cause(
    address: str, payload: bytes, cause: str
) -> None:
    async with call_to(address) as call:
        await hear(call)
        await call.write(payload)
        ended = await end_of(call)
        assert ended.startswith("ABORTED: bad frame")
        assert cause in ended


async def test_an_oversized_payload_ends_the_session(address: str, engine: ToyEngine) -> None:
    async with call_to(address) as call:
        await hear(call)
        await call.write(bytes(MAX_PAYLOAD_BYTES + 1))
        assert (await end_of(call)).startswith(
            "RESOURCE_EXHAUSTED: SERVER: Received message larger"
        )
    async with call_to(address) as call:
        assert isinstance(await hear(call), Hello)
    assert engine.resets >= 1


@pytest.mark.parametrize(
    ("nonce", "cause"),
    [
        (WRONG, "ABORTED: protocol error: planted: a wrong message"),
        (BROKEN, "ABORTED: the engine failed: RuntimeError: planted: a bug"),
    ],
)
async def test_what_the_engine_raises_ends_the_session(
    address: str, nonce: int, cause: str
) -> None:
    async with call_to(address) as call:
        await hear(call)
        await call.write(next(pack([Audit(nonce)])))
        assert await end_of(call) == cause


async def test_a_newer_session_takes_over(address: str, engine: ToyEngine) -> None:
    async with call_to(address) as old:
        await hear(old)
        await old.write(next(pack([Open(1, 1, (5,), GREEDY, 0)])))
        async with call_to(address) as new:
            assert isinstance(await hear(new), Hello)
            assert await end_of(old) == "ABORTED: a newer link took over"
            await new.write(next(pack([Audit(3)])))
            assert await hear(new) == AuditReply(3, 8, 8, 0)
    assert engine.resets >= 1


async def test_a_half_closed_stream_ends_the_session(address: str) -> None:
    async with call_to(address) as call:
        await hear(call)
        await call.done_writing()
        assert await end_of(call) == "ABORTED: the orchestrator ended the stream"


async def test_many_frames_in_one_payload_are_all_answered(address: str) -> None:
    async with call_to(address) as call:
        await hear(call)
        frames = [encode(Audit(n)) for n in range(50)]
        await call.write(b"".join(len(f).to_bytes(4, "big") + f for f in frames))
        heard: list[object] = []
        while len(heard) < 50:
            payload = await call.read()
            assert isinstance(payload, bytes)
            heard += unpack(payload)
        assert heard == [AuditReply(n, 8, 8, 0) for n in range(50)]


async def test_a_peer_that_does_not_read_loses_the_session(address: str, engine: ToyEngine) -> None:
    async with call_to(address) as call:
        await hear(call)
        await call.write(next(pack([Open(1, 1, (5,), GREEDY, credit=2**40)])))
        assert await asyncio.to_thread(engine.was_reset.wait, WAIT_S), "before anything is read"
        assert (await end_of(call)).startswith("ABORTED: outgoing queue full")


async def test_stopping_the_server_ends_the_session() -> None:
    limits = LinkLimits()
    thread = EngineThread(ToyEngine, limits)
    server = SessionServer(thread, SECRET, limits)
    async with call_to(await server.start("127.0.0.1")) as call:
        await hear(call)
        await server.stop()
        assert (await end_of(call)).startswith("UNAVAILABLE")
    assert thread.stop()
