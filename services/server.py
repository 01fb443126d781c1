"""The gRPC server: a stream per request over the orchestrator, health, reflection and drain.

A stream that ends, for whatever reason, closes its generation at once.
"""

import asyncio
import secrets
import uuid
from contextlib import aclosing

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from orchestrator.ports import Generations
from protos.paceline.v1 import generation_pb2 as pb
from protos.paceline.v1 import generation_pb2_grpc as pb_grpc
from services import errors
from services.choices import merged
from services.config import ServerConfig
from services.replies import Answers
from services.translate import Defaults, Served, requests_from

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
# Health answers SERVING under this name as long as the process runs; "" and SERVICE mean ready.
LIVENESS = "liveness"
# After the drain: time for last messages to leave and for handlers to clean up.
STOP_GRACE_S = 1.0

Context = grpc.aio.ServicerContext[pb.GenerateStreamRequest, pb.GenerateStreamResponse]


class Inference(pb_grpc.InferenceServiceServicer):
    """Serves the public API over a `Generations`."""

    def __init__(
        self,
        served: Served,
        generations: Generations,
        *,
        slow_reader_s: float,
        max_request_s: float,
    ) -> None:
        self._served = served
        self._generations = generations
        self._slow_reader_s = slow_reader_s
        self._max_request_s = max_request_s
        self._running: set[asyncio.Task[None]] = set()

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Context) -> None:
        """Stream one completion, or end with the status of what went wrong."""
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            async with asyncio.timeout(self._max_request_s):
                await self._stream(request, context)
        except TimeoutError:
            failure: errors.RequestFailed = errors.TimedOut(
                f"the server ends requests after {self._max_request_s:g} s"
            )
        except errors.RequestFailed as failed:
            failure = failed
        else:
            return
        await context.abort_with_status(errors.to_status(failure))

    async def wait_idle(self, timeout_s: float) -> None:
        """Until every handler has cleaned up, or the time is over."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def _stream(self, message: pb.GenerateStreamRequest, context: Context) -> None:
        defaults = Defaults(request_id=uuid.uuid4().hex, seed=secrets.randbits(63))
        # In a thread: encoding a long prompt must not hold up the other streams.
        requests = await asyncio.to_thread(requests_from, message, self._served, defaults)
        keep_stop = message.stopping.include_stop_str_in_output
        answers = Answers(requests, self._served, keep_stop=keep_stop)
        async with aclosing(merged([*map(self._generations.generate, requests)])) as updates:
            async for choice, update in updates:
                for event in answers.events(choice, update):
                    await self._write(event, context)

    async def _write(self, event: pb.GenerateStreamResponse, context: Context) -> None:
        """Send an event. Tokens that come meanwhile wait with the orchestrator, as one delta."""
        try:
            async with asyncio.timeout(self._slow_reader_s):
                await context.write(event)
        except TimeoutError:
            raise errors.Overloaded(
                f"the client has read nothing for {self._slow_reader_s:g} s; resume with the "
                "tokens it has"
            ) from None


class Server:
    """The edge: the API and health on one address, health alone on another.

    Health is NOT_SERVING until `set_ready`.
    """

    def __init__(
        self, served: Served, generations: Generations, config: ServerConfig, max_request_s: float
    ) -> None:
        self._config = config
        self._generations = generations
        self._inference = Inference(
            served,
            generations,
            slow_reader_s=config.slow_reader_s,
            max_request_s=max_request_s,
        )
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._is_stopping = False
        self.port = 0
        self.health_port = 0

    async def start(self) -> None:
        """Listen. Raises ConfigError if an address cannot be had."""
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(is_ready=False)
        api, self.port = self._listen("server.grpc", self._config.grpc)
        pb_grpc.add_InferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self._inference, api
        )
        if self._config.reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, api)
        if self._config.health:
            _, self.health_port = self._listen("server.health", self._config.health)
        for server in self._servers:
            await server.start()

    async def set_ready(self, *, is_ready: bool) -> None:
        """Say in health whether requests can be served; a stopping server never is."""
        serves = is_ready and not self._is_stopping
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if serves else states.NOT_SERVING
        await self._health.set("", status)
        await self._health.set(SERVICE, status)

    async def stop(self) -> None:
        """Refuse new requests, let running ones end within the drain time, then end the rest."""
        self._is_stopping = True
        await self.set_ready(is_ready=False)
        await self._generations.drain(self._config.drain_s)
        await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in self._servers))
        await self._inference.wait_idle(STOP_GRACE_S)

    def _listen(self, key: str, address: str) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=_options(self._config))
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise errors.ConfigError(
                f"{key}: cannot listen on {address}; is another server running there?"
            ) from error
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._servers.append(server)
        return server, port


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    """Every bound of the transport, none left to a default; admission is the orchestrator's."""
    return [
        ("grpc.so_reuseport", 0),  # a second server on the same port is an error
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_concurrent_streams", config.max_streams),
        ("grpc.http2.min_ping_interval_without_data_ms", round(config.min_ping_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),  # a long prefill sends nothing for a while
    ]
