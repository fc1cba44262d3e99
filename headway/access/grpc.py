"""The gRPC door: the token that a call must carry, and a channel whose calls carry ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from headway.access.gate import Gate
from headway.access.roles import grpc_roles
from headway.access.tls import TlsFiles
from headway.errors import HeadwayError

_KEY = "authorization"
Continue = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class GrpcDoor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns calls away before their request is decoded."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self, continuation: Continue, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """The method's handler, or one that refuses."""
        handler = await continuation(details)
        roles = grpc_roles(details.method)
        if handler is None or roles is None:
            return handler
        metadata = details.invocation_metadata or ()
        # One that stands twice is both, and so neither's value.
        shown = ", ".join(_text(value) for name, value in metadata if name == _KEY)
        try:
            self._gate.admit(shown, roles, "grpc")
        except HeadwayError as error:
            return _refusal(handler, error)
        return handler


def signed(channel: grpc.aio.Channel, token: str) -> grpc.aio.Channel:
    """The channel, its calls carrying the token."""
    return _SignedChannel(channel, token)


class _SignedChannel:
    """Makes methods with the token bound to them: no interceptor's task a call."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = ((_KEY, f"Bearer {token}"),)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._channel.unary_unary(*args, **kwargs), metadata=self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._channel.unary_stream(*args, **kwargs), metadata=self._metadata)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._channel.stream_unary(*args, **kwargs), metadata=self._metadata)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._channel.stream_stream(*args, **kwargs), metadata=self._metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> Any:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """For a server that demands a certificate of the fleet's CA from its callers."""
    pair = (tls.key.read_bytes(), tls.cert.read_bytes())
    return grpc.ssl_server_credentials([pair], tls.ca.read_bytes(), require_client_auth=True)


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """For calls to other services of the fleet."""
    parts = (tls.ca, tls.key, tls.cert)
    return grpc.ssl_channel_credentials(*(part.read_bytes() for part in parts))


def _refusal(handler: grpc.RpcMethodHandler, error: HeadwayError) -> grpc.RpcMethodHandler:
    """A handler of the same kind that answers with the error; the request is not decoded."""
    code = getattr(grpc.StatusCode, error.grpc_status)
    kind = (("headway-kind", error.kind),)

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> Any:
        await context.abort(code, str(error), kind)

    async def refuse_stream(_: Any, context: grpc.aio.ServicerContext) -> Any:
        await context.abort(code, str(error), kind)
        yield b""

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")
