"""gRPC as Headway uses it: servers with health and reflection, channels, errors."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headway import errors
from headway.errors import HeadwayError, Unavailable
from headway.telemetry import get_logger

log = get_logger(__name__)

MAX_MESSAGE_BYTES = 256 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
_CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a shared port
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
_BY_KIND = {
    cls.kind: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, HeadwayError)
}
_BY_STATUS = {cls.grpc_status: cls for cls in reversed(list(_BY_KIND.values()))}


@asynccontextmanager
async def grpc_server(
    host: str, port: int, register: Callable[[grpc.aio.Server], Sequence[str]]
) -> AsyncIterator[int]:
    """A running server with health and reflection; gives the bound port.

    `register` adds the servicers and returns their full names. Raises Unavailable
    when the port is taken.
    """
    server = grpc.aio.server(interceptors=[_ErrorInterceptor()], options=_SERVER_OPTIONS)
    names = register(server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    served = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(served, server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise Unavailable(f"cannot listen on {host}:{port} (gRPC): the port is in use")
    await server.start()
    for name in ("", *names):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield bound
    finally:
        await checks.enter_graceful_shutdown()
        await server.stop(grace=2.0)


def channel(address: str) -> grpc.aio.Channel:
    """A channel to host:port with Headway's limits and keepalive."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def raise_headway(error: grpc.aio.AioRpcError, peer: str = "") -> NoReturn:
    """Raises the HeadwayError that a peer's status stands for."""
    details = error.details() or error.code().name
    kind = ""
    for key, value in error.trailing_metadata() or ():
        if key == "headway-kind":
            kind = str(value)
    cls = _BY_KIND.get(kind) or _BY_STATUS.get(error.code().name, HeadwayError)
    raise cls(f"{peer}: {details}" if peer else details) from error


class _ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns a HeadwayError of a handler into its status; logs anything else."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None:
            return handler
        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary is not None:
            inner = handler.unary_unary

            async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
                try:
                    return await inner(request, context)
                except Exception as error:
                    await _abort(context, details.method, error)

            return grpc.unary_unary_rpc_method_handler(call, *codec)
        if inspect.isasyncgenfunction(handler.unary_stream):
            parts = handler.unary_stream

            async def stream(request: Any, context: grpc.aio.ServicerContext) -> Any:
                try:
                    async for part in parts(request, context):
                        yield part
                except Exception as error:
                    await _abort(context, details.method, error)

            return grpc.unary_stream_rpc_method_handler(stream, *codec)
        return handler


async def _abort(context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, HeadwayError):
        context.set_trailing_metadata((("headway-kind", error.kind),))
        await context.abort(getattr(grpc.StatusCode, error.grpc_status), str(error))
    log.exception("%s failed", method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
