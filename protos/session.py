"""The worker's end of its stream: a gRPC server with one method that carries frames.

One session at a time: a newer one takes over. Every end of a session has a cause in its status.
"""

import asyncio
import hmac

import grpc

from protos.codec import DecodeError
from protos.engine_thread import EngineThread, Link, LinkLimits
from protos.frames import MAX_PAYLOAD_BYTES, Outbox, unpack

SERVICE = "paceline.internal.Worker"
METHOD = "Session"
SECRET_KEY = "paceline-secret"
_MAX_CAUSE_CHARS = 1000


def keepalive(limits: LinkLimits) -> list[tuple[str, int]]:
    """Channel arguments of either end: size bounds, and pings that notice a silent peer."""
    ping_ms = int(1000 * limits.keepalive_s)
    return [
        ("grpc.max_send_message_length", MAX_PAYLOAD_BYTES),
        ("grpc.max_receive_message_length", MAX_PAYLOAD_BYTES),
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", ping_ms),
        ("grpc.http2.ping_timeout_ms", ping_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", ping_ms // 2),
    ]


class SessionServer:
    """Serves the sessions of one engine; only a peer that knows `secret` is let in."""

    def __init__(self, engine: EngineThread, secret: str, limits: LinkLimits) -> None:
        self._engine = engine
        self._secret = secret.encode()
        self._limits = limits
        options = [*keepalive(limits), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options)
        # Without serializers gRPC passes bytes, and a bad frame is ours to name.
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._session
        )
        service = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))

    async def start(self, host: str) -> str:
        """Listen on a free port of `host`; the address to give to the orchestrator."""
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        return f"{host}:{port}"

    async def stop(self) -> None:
        """End the session and the server."""
        await self._server.stop(grace=None)

    async def _session(
        self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        await self._check_secret(context)
        outbox = Outbox(self._limits.outbox)
        link = self._engine.connect(outbox.put, outbox.close)
        reading = asyncio.create_task(_read(context, link))
        try:
            cause = await outbox.pump(context.write)
        finally:
            link.end("the stream is gone")
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await context.abort(grpc.StatusCode.ABORTED, cause[:_MAX_CAUSE_CHARS])

    async def _check_secret(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        given = dict(context.invocation_metadata() or ()).get(SECRET_KEY, "")
        given_bytes = given.encode() if isinstance(given, str) else given
        if not hmac.compare_digest(given_bytes, self._secret):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong secret")


async def _read(context: grpc.aio.ServicerContext[bytes, bytes], link: Link) -> None:
    """Hand every message that arrives to the engine, until the stream or the link ends."""
    try:
        while isinstance(payload := await context.read(), bytes):
            for message in unpack(payload):
                link.send(message)
    except DecodeError as error:
        link.end(f"bad frame: {error}")
    link.end("the orchestrator ended the stream")
