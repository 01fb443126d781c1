"""What only a stream to another process can meet: strangers, moves, deaths and frozen peers."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from orchestrator.ports import WorkerLost
from orchestrator.stream_port import StreamPort
from protos.engine_thread import LinkLimits
from protos.frames import pack
from protos.messages import Audit, Hello, Open
from protos.sampling import GREEDY
from protos.session import METHOD, SERVICE
from tests.fakes import ToyEngine
from tests.opened import LIMITS, SECRET, at, nowhere, serving, streamed


async def test_a_full_outgoing_queue_ends_the_link() -> None:
    async with streamed(ToyEngine) as port:
        await port.connect()
        await port.receive()
        for nonce in range(LIMITS.outbox + 1):
            port.send(Audit(nonce))
        with pytest.raises(WorkerLost, match="outgoing queue full: more than 64 messages wait"):
            await port.receive()


@asynccontextmanager
async def deaf_worker() -> AsyncIterator[str]:
    """A worker that says hello and reads nothing; its address."""

    async def session(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.write(next(pack([ToyEngine().hello()])))
        await asyncio.Event().wait()

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(session)
    server = grpc.aio.server()
    service = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_full_outgoing_queue_ends_the_link_while_a_write_waits_for_the_peer() -> None:
    large = Open(1, 1, (70000,) * 100_000, GREEDY, 1)
    async with deaf_worker() as address, asyncio.timeout(10):
        port = StreamPort("toy", at(address), SECRET, LIMITS)
        await port.connect()
        await port.receive()
        waiting = asyncio.create_task(port.receive())
        for _ in range(2 * LIMITS.outbox + 2):
            port.send(large)
            await asyncio.sleep(0.001)  # the writer is at work
        with pytest.raises(WorkerLost, match="outgoing queue full: more than 64 messages wait"):
            await waiting
        await port.close()


async def test_a_wrong_secret_is_refused() -> None:
    async with serving(ToyEngine) as address:
        port = StreamPort("toy", at(address), "wrong", LIMITS)
        with pytest.raises(WorkerLost, match=f"toy at {address}: UNAUTHENTICATED: wrong secret"):
            await port.connect()


async def test_nobody_at_the_address_is_a_lost_worker_at_once() -> None:
    port = StreamPort("toy", at("127.0.0.1:1"), SECRET, LinkLimits(connect_s=60))
    with pytest.raises(WorkerLost, match=r"toy at 127\.0\.0\.1:1: UNAVAILABLE"):
        await asyncio.wait_for(port.connect(), 5)


async def test_a_worker_that_cannot_be_located_is_lost_in_time() -> None:
    port = StreamPort("toy", nowhere, SECRET, LinkLimits(connect_s=0.01))
    with pytest.raises(WorkerLost, match="toy at unknown: no Hello within"):
        await port.connect()


async def test_a_worker_that_moved_is_found_again() -> None:
    async with serving(ToyEngine) as new, asyncio.timeout(10):
        async with serving(ToyEngine) as old:
            port = StreamPort("toy", at(old, new), SECRET, LIMITS)
            await port.connect()
            await port.receive()
        with pytest.raises(WorkerLost, match="toy: "):
            await port.receive()
        await port.connect()
        assert isinstance(await port.receive(), Hello)
        await port.close()


async def test_the_newer_of_two_orchestrators_takes_over() -> None:
    async with serving(ToyEngine) as address, asyncio.timeout(10):
        old, new = (StreamPort(name, at(address), SECRET, LIMITS) for name in ("old", "new"))
        await old.connect()
        await old.receive()
        await new.connect()
        with pytest.raises(WorkerLost, match="old: ABORTED: a newer link took over"):
            await old.receive()
        assert isinstance(await new.receive(), Hello)
        await old.close()
        await new.close()


WORKER = """
import asyncio, sys
from protos.engine_thread import EngineThread, LinkLimits
from protos.session import SessionServer
from tests.fakes import ToyEngine

async def main():
    limits = LinkLimits(keepalive_s=0.2)
    server = SessionServer(EngineThread(ToyEngine, limits), "secret", limits)
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize(("sent", "within_s"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 5.0)])
async def test_a_worker_process_that_dies_or_freezes_is_noticed(
    sent: signal.Signals, within_s: float
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        port = StreamPort("toy", at(address), SECRET, LinkLimits(keepalive_s=0.2))
        await port.connect()
        await port.receive()
        process.send_signal(sent)
        with pytest.raises(WorkerLost, match="toy: UNAVAILABLE"):
            await asyncio.wait_for(port.receive(), within_s)
        await port.close()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
