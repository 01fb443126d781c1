"""The server over a real channel: streams, ends of every kind, health, limits and drain."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest
from grpc.aio import AioRpcError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from orchestrator.request import (
    Delta,
    Finished,
    FinishReason,
    Refusal,
    Refused,
    Request,
    Stats,
    Update,
)
from protos.paceline.v1 import generation_pb2 as pb
from services.client import MAX_MESSAGE_BYTES, Client, Event, Options
from services.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    ServerFault,
    TimedOut,
    Unavailable,
    UnknownModel,
)
from services.server import LIVENESS, SERVICE, Server
from services.translate import Served
from tests.unit.services.edge_fakes import DONE, ON_FREE_PORTS, FakeGenerations, edge, words
from tests.unit.services.tiny_folder import id_of

METHOD = f"/{SERVICE}/GenerateStream"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def all_events(client: Client, prompt: str = "the cat", **options: object) -> list[Event]:
    asked = Options(**options)  # type: ignore[arg-type]
    return [event async for event in client.generate_stream(prompt, asked, timeout_s=20)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, pb.Delta))


def raw_method(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
    return channel.unary_stream(METHOD)


async def health_of(port: int, service: str = "") -> int:
    """The status that a health check gives, in a call of its own."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/grpc.health.v1.Health/Check"
        )
        asked = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2.HealthCheckResponse.FromString(await check(asked.SerializeToString()))
        return int(answer.status)


async def read_to_the_end(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> None:
    while await call.read() is not grpc.aio.EOF:
        continue


async def test_a_stream_starts_brings_its_text_and_ends(served: Served) -> None:
    generations = FakeGenerations(words(served, "안녕"), words(served, " 👍🏽"), DONE)
    async with edge(served, generations) as (_, client):
        events = await all_events(client, seed=5, request_id="mine")
    first, *deltas, last = events
    assert isinstance(first, pb.Started)
    assert (first.request_id, first.sampling.seed, first.model_revision) == ("mine", 5, "r1")
    assert text_of(events) == "안녕 👍🏽"
    assert isinstance(last, pb.Finished)
    ids = [id for delta in deltas if isinstance(delta, pb.Delta) for id in delta.token_ids]
    assert last.usage.completion_tokens == len(ids)
    assert tuple(ids) == served.tokenizer.encode("안녕") + served.tokenizer.encode(" 👍🏽")


async def test_a_stop_string_is_kept_in_the_text_on_request(served: Served) -> None:
    stopped = Finished(FinishReason.STOP, Stats())
    async with edge(served, FakeGenerations(words(served, "the END"), stopped)) as (_, client):
        assert text_of(await all_events(client, stop=("END",))) == "the "
        assert text_of(await all_events(client, stop=("END",), include_stop=True)) == "the END"


async def test_an_event_as_large_as_the_limit_allows_arrives(served: Served) -> None:
    token = id_of(served.tokenizer.library, "<plain added>")
    long = Delta((token,) * 360_000)  # with its ids over 4 MiB, the transport's own limit
    async with edge(served, FakeGenerations(long, DONE)) as (_, client):
        assert text_of(await all_events(client)) == "<plain added>" * 360_000


async def test_ids_and_seeds_the_client_leaves_out_are_fresh(served: Served) -> None:
    generations = FakeGenerations(DONE)
    async with edge(served, generations) as (_, client):
        for _ in range(3):
            await all_events(client)
    assert len({request.request_id for request in generations.requests}) == 3
    assert len({request.sampling.seed for request in generations.requests}) == 3


async def test_a_request_that_cannot_be_served_never_reaches_the_orchestrator(
    served: Served,
) -> None:
    generations = FakeGenerations(DONE)
    async with edge(served, generations) as (_, client):
        with pytest.raises(InvalidRequest) as caught:
            await all_events(client, stop=("",))
        assert caught.value.field == "stopping.stop_strings[0]"
        with pytest.raises(UnknownModel):
            await all_events(client, model="other")
        assert generations.requests == []
        assert await all_events(client)


async def test_a_refused_request_gets_no_event_and_a_time_to_retry(served: Served) -> None:
    refused = Refused(Refusal.QUEUE_FULL, "64 requests wait", retry_s=1.5)
    async with edge(served, FakeGenerations(refused)) as (_, client):
        async with aclosing(client.generate_stream("x")) as events:
            with pytest.raises(Overloaded, match="64 requests wait") as caught:
                await anext(events)
        assert caught.value.retry_s == 1.5


async def test_a_lost_target_ends_the_stream_after_the_tokens_so_far(served: Served) -> None:
    lost = Finished(FinishReason.UNAVAILABLE, Stats(), "shard 1 is gone")
    seen: list[Event] = []
    async with (
        edge(served, FakeGenerations(words(served, "the cat"), lost)) as (_, client),
        aclosing(client.generate_stream("x")) as events,
    ):
        seen += [await anext(events), await anext(events)]
        with pytest.raises(Unavailable, match="shard 1 is gone"):
            await anext(events)
    assert text_of(seen) == "the cat"


async def test_a_client_that_stops_listening_closes_the_generation(served: Served) -> None:
    generations = FakeGenerations(words(served, "the cat"), asyncio.Event())
    async with edge(served, generations) as (_, client):
        async with aclosing(client.generate_stream("x")) as events:
            async for event in events:
                if isinstance(event, pb.Delta):
                    break
        await generations.until_running(0)


async def test_a_client_that_goes_before_the_first_token_closes_the_generation(
    served: Served,
) -> None:
    generations = FakeGenerations(asyncio.Event())
    async with edge(served, generations) as (_, client):
        reading = asyncio.create_task(all_events(client))
        await generations.until_running(1)
        reading.cancel()
        await generations.until_running(0)
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_passed_deadline_closes_the_generation(served: Served) -> None:
    generations = FakeGenerations(words(served, "the"), asyncio.Event())
    async with edge(served, generations) as (_, client):
        with pytest.raises(TimedOut):
            async for _ in client.generate_stream("x", timeout_s=0.2):
                pass
        await generations.until_running(0)


async def test_a_request_without_a_deadline_has_the_servers(served: Served) -> None:
    generations = FakeGenerations(words(served, "the"), asyncio.Event())
    async with edge(served, generations, max_request_s=0.2) as (_, client):
        with pytest.raises(TimedOut, match=r"0\.2 s"):
            async for _ in client.generate_stream("x"):
                pass
        await generations.until_running(0)


class Flood(FakeGenerations):
    """Never ends the request called "flood"."""

    async def generate(self, request: Request) -> AsyncGenerator[Update, None]:
        async with aclosing(super().generate(request)) as updates:
            first = await anext(updates)
            while request.request_id == "flood":
                yield first
            yield first
            async for update in updates:
                yield update


async def test_a_reader_that_takes_nothing_loses_its_stream_and_no_other(served: Served) -> None:
    generations = Flood(Delta(served.tokenizer.encode("the cat sat on the mat ") * 2000), DONE)
    config = replace(ON_FREE_PORTS, slow_reader_s=0.3)
    async with (
        edge(served, generations, config) as (server, client),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        request = pb.GenerateStreamRequest(text="x", request_id="flood")
        stalled = raw_method(channel)(request.SerializeToString())
        await stalled.read()
        assert isinstance((await all_events(client))[-1], pb.Finished)
        await generations.until_running(0)
        with pytest.raises(AioRpcError) as caught:  # at the end of what was under way
            await read_to_the_end(stalled)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_says_ready_only_when_it_is(served: Served) -> None:
    server = Server(served, FakeGenerations(DONE), ON_FREE_PORTS, 60.0)
    await server.start()
    try:
        for port in (server.port, server.health_port):
            await server.set_ready(is_ready=False)
            assert await health_of(port) == await health_of(port, SERVICE) == NOT_SERVING
            assert await health_of(port, LIVENESS) == SERVING
            await server.set_ready(is_ready=True)
            assert await health_of(port) == await health_of(port, SERVICE) == SERVING
            with pytest.raises(AioRpcError) as caught:
                await health_of(port, "nothing")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        await server.stop()


async def test_a_stopping_server_lets_streams_end_and_is_never_ready_again(
    served: Served,
) -> None:
    go_on = asyncio.Event()
    generations = FakeGenerations(words(served, "the"), go_on, words(served, " end"), DONE)
    async with edge(served, generations) as (server, client):
        reading = asyncio.create_task(all_events(client))
        await generations.until_running(1)
        stopping = asyncio.create_task(server.stop())
        await generations.until_draining()
        assert await health_of(server.health_port, SERVICE) == NOT_SERVING
        await server.set_ready(is_ready=True)
        assert await health_of(server.health_port, SERVICE) == NOT_SERVING
        assert await health_of(server.health_port, LIVENESS) == SERVING
        go_on.set()
        assert text_of(await reading) == "the end"
        await stopping


async def test_stop_ends_streams_that_outlast_the_drain_and_cleans_up(served: Served) -> None:
    generations = FakeGenerations(words(served, "the"), asyncio.Event())
    config = replace(ON_FREE_PORTS, drain_s=0.1)
    async with edge(served, generations, config) as (server, client):
        reading = asyncio.create_task(all_events(client))
        await generations.until_running(1)
        await server.stop()
        assert generations.running == 0
        with pytest.raises(RequestFailed):
            await reading


class SlowToClose(FakeGenerations):
    """Takes its time to free what a generation holds, and does not wait for it in a drain."""

    async def generate(self, request: Request) -> AsyncGenerator[Update, None]:
        await self._count(+1)
        try:
            await asyncio.Event().wait()
            yield DONE
        finally:
            await asyncio.sleep(0.2)
            await self._count(-1)

    async def drain(self, timeout_s: float) -> None:
        self.is_draining = True


async def test_stop_returns_after_the_clean_up_of_streams_that_ended(served: Served) -> None:
    generations = SlowToClose()
    async with edge(served, generations) as (server, client):
        reading = asyncio.create_task(all_events(client))
        await generations.until_running(1)
        reading.cancel()
        await asyncio.wait([reading])
        await server.stop()
        assert generations.running == 0


async def test_reflection_lists_the_services_unless_it_is_off(served: Served) -> None:
    for is_on in (True, False):
        config = replace(ON_FREE_PORTS, reflection=is_on)
        async with (
            edge(served, FakeGenerations(DONE), config) as (server, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = method(iter([request.SerializeToString()]))
            if is_on:
                read = await call.read()
                assert isinstance(read, bytes)
                reply = reflection_pb2.ServerReflectionResponse.FromString(read)
                names = {each.name for each in reply.list_services_response.service}
                assert {SERVICE, "grpc.health.v1.Health"} <= names
            else:
                with pytest.raises(AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_over_the_limit_is_refused_and_the_server_lives(served: Served) -> None:
    config = replace(ON_FREE_PORTS, max_message_bytes=1 << 20)
    async with edge(served, FakeGenerations(DONE), config) as (_, client):
        with pytest.raises(InvalidRequest, match=r"too large .* shorter prompt"):
            await all_events(client, "x" * (1 << 20))
        with pytest.raises(InvalidRequest, match=rf"vs\. {MAX_MESSAGE_BYTES}\).* shorter prompt"):
            await all_events(client, "x" * MAX_MESSAGE_BYTES)
        with pytest.raises(InvalidRequest):
            await all_events(client, "x" * ((1 << 20) - 1000))
        assert await all_events(client)


async def test_bytes_that_are_no_request_are_refused_and_the_server_lives(
    served: Served,
) -> None:
    generations = FakeGenerations(DONE)
    async with edge(served, generations) as (server, client):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            raw = raw_method(channel)
            for junk in (b"\x22\x02\xff\xfe", b"\xff" * 9):  # a text that is not UTF-8; no message
                with pytest.raises(AioRpcError):
                    await raw(junk).read()
        assert generations.requests == []
        assert await all_events(client)


async def test_many_streams_share_a_channel_and_health_still_answers(served: Served) -> None:
    go_on = asyncio.Event()
    generations = FakeGenerations(words(served, "the"), go_on, DONE)
    async with edge(served, generations) as (server, client):
        streams = [asyncio.create_task(all_events(client)) for _ in range(150)]
        await generations.until_running(150)
        assert await health_of(server.port) == SERVING
        go_on.set()
        assert {text_of(events) for events in await asyncio.gather(*streams)} == {"the"}


async def test_pings_during_a_silence_end_no_stream_unless_they_come_too_often(
    served: Served,
) -> None:
    silence = asyncio.Event()
    generations = FakeGenerations(silence, DONE)
    pinging = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    request = pb.GenerateStreamRequest(text="x").SerializeToString()
    lenient, strict = (replace(ON_FREE_PORTS, min_ping_s=seconds) for seconds in (0.5, 300.0))
    async with (
        edge(served, generations, lenient) as (kind, _),
        edge(served, generations, strict) as (harsh, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{kind.port}", options=pinging) as patient,
        grpc.aio.insecure_channel(f"127.0.0.1:{harsh.port}", options=pinging) as chased,
    ):
        survives, dies = (raw_method(channel)(request) for channel in (patient, chased))
        with pytest.raises(AioRpcError, match="Too many pings"):
            await dies.read()
        silence.set()
        assert len([message async for message in survives]) == 2


async def test_a_port_that_is_taken_is_a_configuration_error(served: Served) -> None:
    async with edge(served, FakeGenerations(DONE)) as (server, _):
        config = replace(ON_FREE_PORTS, grpc=f"127.0.0.1:{server.port}")
        second = Server(served, FakeGenerations(DONE), config, 60.0)
        try:
            with pytest.raises(ConfigError, match=r"server\.grpc: cannot listen"):
                await second.start()
        finally:
            await second.stop()


async def test_a_fault_of_ours_is_no_fault_of_the_client(served: Served) -> None:
    broken = Delta((served.tokenizer.vocab_size,))  # the orchestrator never sends such an id
    generations = FakeGenerations(broken, DONE)
    async with edge(served, generations) as (_, client):
        with pytest.raises(ServerFault):
            await all_events(client)
        await generations.until_running(0)
