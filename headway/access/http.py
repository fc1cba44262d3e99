"""The HTTP door: tokens, the size of a body, and what a browser may be tricked into.

A plain ASGI middleware: it is there before anything of a request is read, and leaves
streams alone.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.access.gate import REFUSED, Gate
from headway.access.roles import http_roles
from headway.errors import Forbidden, HeadwayError, Unauthorized
from headway.ports import is_loopback

MAX_BODY_BYTES = 64 << 10
"""Where an app says nothing else."""


class HttpDoor:
    """Wraps an app. `gate` None: nobody needs a token, and only this machine is answered."""

    def __init__(self, app: ASGIApp, gate: Gate | None, max_body_bytes: int) -> None:
        self._app = app
        self._gate = gate
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here speaks WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _headers(scope)
        try:
            self._check(scope, headers)
        except HeadwayError as error:
            await _refuse(send, error)
            return
        await self._app(scope, self._measured(headers, receive), send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        roles = http_roles(scope["method"], scope["path"])
        if self._gate is None:
            _check_no_browser_trick(headers)
        elif roles is not None:
            self._gate.admit(headers.get("authorization"), roles, "http")

    def _measured(self, headers: dict[str, str], receive: Receive) -> Receive:
        """Ends the reading of a body as soon as it is, or says it is, too long."""
        limit = self._max_body_bytes
        declared = headers.get("content-length", "")
        size = 0

        def check(num_bytes: int) -> None:
            if num_bytes > limit:
                raise HTTPException(413, f"a body has at most {limit} bytes here")

        async def measured() -> Message:
            nonlocal size
            check(int(declared) if declared.isdecimal() else 0)
            message = await receive()
            # Counted whatever was declared: beside chunks the declaration does not hold.
            size += len(message.get("body", b""))
            check(size)
            return message

        return measured


def _check_no_browser_trick(headers: dict[str, str]) -> None:
    """Without tokens a page on the web must not reach us through its reader's browser.

    Neither by a name that was made to point here (Host), nor by a request across sites (Origin).
    """
    host = headers.get("host", "")
    if host and not is_loopback(_name(f"//{host}")):
        REFUSED.labels("http", "host").inc()
        raise Forbidden("this service has no tokens and answers only to names of this machine")
    origin = headers.get("origin", "")
    if origin and urlsplit(origin).netloc != host:
        REFUSED.labels("http", "origin").inc()
        raise Forbidden("this service has no tokens and takes nothing from pages of other sites")


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _headers(scope: Scope) -> dict[str, str]:
    """What the door looks at. One that stands twice is both, and so neither's value."""
    wanted = (b"authorization", b"content-length", b"host", b"origin")
    pairs: list[tuple[bytes, bytes]] = scope["headers"]
    found: dict[str, str] = {}
    for key, value in pairs:
        if key in wanted:
            name, text = key.decode(), value.decode("latin-1")
            found[name] = f"{found[name]}, {text}" if name in found else text
    return found


async def _refuse(send: Send, error: HeadwayError) -> None:
    body = json.dumps({"error": {"kind": error.kind, "message": str(error)}}).encode()
    headers: list[Any] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        # The body of the request stays unread.
        (b"connection", b"close"),
    ]
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
