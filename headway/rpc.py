"""gRPC as Headway uses it: servers with health and reflection, channels, errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headway import errors
from headway.access.grpc import GrpcDoor, channel_credentials, server_credentials, signed
from headway.access.identity import own_token, process_tls
from headway.access.process import Access, process_access
from headway.access.tls import TlsFiles
from headway.errors import HeadwayError, Unavailable, sayable
from headway.ports import checked_address, is_loopback, with_port
from headway.telemetry import get_logger

log = get_logger(__name__)

MAX_REQUEST_BYTES = 16 << 20
"""What a service takes in one message, where it says nothing else."""

MAX_ANSWER_BYTES = 64 << 20
_MAX_CALLS = 1000  # at once; beyond: RESOURCE_EXHAUSTED
_RETRY_AFTER = "retry-after-ms"
_LONGEST_HINT_S = 600.0
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", -1),  # the service's own limit decides
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the world outside, not for the fleet
]
_SERVER_OPTIONS = [
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
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
    host: str,
    port: int,
    register: Callable[[grpc.aio.Server], Sequence[str]],
    *,
    max_request_bytes: int = MAX_REQUEST_BYTES,
    access: Access | None = None,
) -> AsyncIterator[int]:
    """A running server with health and reflection, behind a door; gives the bound port.

    `register` adds the servicers and returns their full names. `access`: the process's own
    by default. Raises Unavailable when the port is taken.
    """
    access = access or process_access()
    doors = [GrpcDoor(access.gate)] if access.gate is not None else []
    server = grpc.aio.server(
        interceptors=[*doors, _ErrorInterceptor()],
        options=[*_SERVER_OPTIONS, ("grpc.max_receive_message_length", max_request_bytes)],
        maximum_concurrent_rpcs=_MAX_CALLS,
    )
    names = register(server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    served = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(served, server)
    bound = _bind(server, host, port, access.tls)
    await server.start()
    for name in ("", *names):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield bound
    finally:
        await checks.enter_graceful_shutdown()
        await server.stop(grace=2.0)


def channel(
    address: str, access: Access | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """A channel to host:port with Headway's limits and keepalive, our token and certificate.

    `access`: the process's own by default. `options`: gRPC's, beyond those that all have.
    InvalidSpec when the address is none.
    """
    options = [*_CHANNEL_OPTIONS, *options]
    access = access or Access(token=own_token(), tls=process_tls())
    target = f"dns:///{checked_address(address)}"  # a host may be called like a scheme
    if access.tls is None:
        link = grpc.aio.insecure_channel(target, options=options)
    else:
        name = access.tls.name
        named = [("grpc.ssl_target_name_override", name)] if name else []
        credentials = channel_credentials(access.tls)
        link = grpc.aio.secure_channel(target, credentials, [*options, *named])
    return signed(link, access.token) if access.token else link


def raise_headway(error: grpc.aio.AioRpcError, peer: str = "") -> NoReturn:
    """Raises the HeadwayError that a peer's status stands for."""
    details = error.details() or error.code().name
    facts = {key: str(value) for key, value in error.trailing_metadata() or ()}
    kind = facts.get("headway-kind", "")
    if not kind and "larger than max" in details:
        kind = errors.InvalidSpec.kind  # gRPC's own limit: no repeat will fit either
    cls = _BY_KIND.get(kind) or _BY_STATUS.get(error.code().name, HeadwayError)
    raised = cls(f"{peer}: {details}" if peer else details)
    if (after_ms := facts.get(_RETRY_AFTER, "")).isdecimal():
        raised.retry_after_s = min(int(after_ms) / 1000, _LONGEST_HINT_S)
    raise raised from error


def _bind(server: grpc.aio.Server, host: str, port: int, tls: TlsFiles | None) -> int:
    where = with_port(host, port)
    try:
        if tls is not None:
            bound = server.add_secure_port(where, server_credentials(tls))
        else:
            bound = server.add_insecure_port(where)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise Unavailable(f"cannot listen on {where} (gRPC): the port is in use")
    if tls is None and not is_loopback(host):
        log.warning("gRPC on %s is not encrypted: tokens cross the network as they are", host)
    return int(bound)


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
        facts = [("headway-kind", error.kind)]
        if error.retry_after_s is not None:
            facts.append((_RETRY_AFTER, str(math.ceil(error.retry_after_s * 1000))))
        context.set_trailing_metadata(tuple(facts))
        await context.abort(getattr(grpc.StatusCode, error.grpc_status), sayable(str(error)))
    log.exception("%s failed", method, exc_info=error)
    message = sayable(f"{type(error).__name__}: {error}")
    await context.abort(grpc.StatusCode.INTERNAL, message)
