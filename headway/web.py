"""HTTP as Headway uses it: health, readiness, metrics, errors, one way to serve."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from headway import __version__
from headway.errors import HeadwayError, Unavailable


def make_app(title: str, ready: Callable[[], bool]) -> FastAPI:
    """An app with /healthz, /readyz, /metrics and errors as JSON.

    Every error answers `{"error": {"kind": …, "message": …}}`.
    """
    app = FastAPI(title=title, version=__version__, redoc_url=None)

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
        return error_response(error.http_status, error.kind, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        where = "; ".join(
            f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()
        )
        return error_response(422, "invalid", where)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        kind = "not_found" if error.status_code == 404 else "invalid"
        return error_response(error.status_code, kind, str(error.detail))

    return app


def error_response(status: int, kind: str, message: str) -> JSONResponse:
    """The one shape of an error over HTTP."""
    return JSONResponse({"error": {"kind": kind, "message": message}}, status)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to headway.lifecycle."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


@asynccontextmanager
async def serve_http(app: FastAPI, host: str, port: int) -> AsyncIterator[int]:
    """Serves `app` while the block runs; gives the bound port.

    Raises Unavailable when the port is taken.
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
    config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=2)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        listener.close()
