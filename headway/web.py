"""HTTP as Headway uses it: health, readiness, metrics, errors, one way to serve."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from headway import __version__
from headway.access.http import MAX_BODY_BYTES, HttpDoor
from headway.access.identity import process_tls
from headway.access.process import Access, process_access
from headway.access.tls import TlsFiles
from headway.errors import HeadwayError, Unavailable, sayable
from headway.ports import is_loopback, with_port
from headway.telemetry import get_logger

log = get_logger(__name__)

_MAX_CONNECTIONS = 1000
_MAX_HEAD_BYTES = 32 << 10
_ERRORS = (
    (401, "No token, or one that is not known"),
    (403, "The token's role may not do this"),
    (404, "There is no such thing"),
    (409, "It contradicts what is there"),
    (413, "The body is too long"),
    (422, "The request is faulty; the message names every fault"),
    (503, "Not now: the fleet lacks something, or Redis cannot be reached"),
)


class ErrorBody(BaseModel):
    """What went wrong: its stable name, and words for people."""

    kind: str
    message: str


class ErrorAnswer(BaseModel):
    """The body of every error."""

    error: ErrorBody


def make_app(
    title: str,
    ready: Callable[[], bool],
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    access: Access | None = None,
) -> FastAPI:
    """An app with /healthz, /readyz, /metrics and errors as JSON, behind a door.

    Every error answers `{"error": {"kind": …, "message": …}}`. `access`: the process's own
    by default.
    """
    gate = (access or process_access()).gate
    app = FastAPI(
        title=title,
        version=__version__,
        redoc_url=None,
        responses={status: {"model": ErrorAnswer, "description": text} for status, text in _ERRORS},
        dependencies=[Depends(HTTPBearer(auto_error=False))] if gate is not None else [],
    )
    app.add_middleware(HttpDoor, gate=gate, max_body_bytes=max_body_bytes)

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok")

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> PlainTextResponse:
        return PlainTextResponse("ready") if ready() else PlainTextResponse("not ready", 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(HeadwayError)
    async def headway_error(_: Request, error: HeadwayError) -> JSONResponse:
        hint_s = error.retry_after_s
        headers = None if hint_s is None else {"Retry-After": str(math.ceil(hint_s))}
        return error_response(error.http_status, error.kind, str(error), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(422, "invalid", "; ".join(map(fault_of, error.errors())))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        kind = "not_found" if error.status_code == 404 else "invalid"
        # 400 is the framework's for a body that cannot be read: here as faulty as any other.
        status = 422 if error.status_code == 400 else error.status_code
        return error_response(status, kind, _reason(request, error), error.headers)

    @app.exception_handler(Exception)
    async def crash(_: Request, error: Exception) -> JSONResponse:
        return error_response(500, HeadwayError.kind, f"{type(error).__name__}: see the log")

    return app


def fault_of(error: Mapping[str, Any]) -> str:
    """One fault of a request, with its place in it."""
    if error["type"] == "json_invalid":
        why = error.get("ctx", {}).get("error", "damaged")
        return f"the body is not JSON: {why} (character {error['loc'][-1]})"
    if tuple(error["loc"]) == ("body",) and isinstance(error.get("input"), bytes):
        return "the body is not read as JSON: send it with `Content-Type: application/json`"
    return f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}"


def _reason(request: Request, error: HTTPException) -> str:
    """Why there is no answer, with what was asked for where the framework says one word only."""
    path = request.url.path
    if error.detail == HTTPStatus(error.status_code).phrase:
        if error.status_code == HTTPStatus.NOT_FOUND:
            return f"there is no {path} here; GET /docs shows what there is"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            taken = (error.headers or {}).get("Allow", "another method")
            return f"{path} is not for {request.method}: it takes {taken}"
    return str(error.detail)


def error_response(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The one shape of an error over HTTP."""
    return JSONResponse({"error": {"kind": kind, "message": sayable(message)}}, status, headers)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to headway.lifecycle."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def http_url(host: str, port: int) -> str:
    """Where a server of this process is reached."""
    return f"{'https' if process_tls() else 'http'}://{with_port(host, port)}"


@asynccontextmanager
async def serve_http(
    app: FastAPI, host: str, port: int, tls: TlsFiles | None = None
) -> AsyncIterator[int]:
    """Serves `app` while the block runs; gives the bound port.

    `tls`: the process's own certificates by default. Unavailable when the port is taken.
    """
    # asyncio switches Nagle's delay off (40 ms an answer) only where it reads TCP.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port} (HTTP): {error.strerror}") from None
    tls = tls or process_tls()
    config = uvicorn.Config(
        app,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=2,
        limit_concurrency=_MAX_CONNECTIONS,
        server_header=False,
        http="h11",  # the parser that bounds a request's head
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
    if tls is None and not is_loopback(host):
        log.warning("HTTP on %s is not encrypted: tokens cross the network as they are", host)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        listener.close()
