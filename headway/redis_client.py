"""Connections to Redis or Valkey: one place for timeouts, error texts and secrets in URLs."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import redis.exceptions as rex
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from headway.errors import (
    Conflict,
    HeadwayError,
    InvalidSpec,
    LedgerViolation,
    NotFound,
    StoreFull,
    Unauthorized,
    Unavailable,
)

SOCKET_TIMEOUT_S = 10.0
"""Longest wait for one answer."""


def connect(url: str, connect_timeout_s: float = 1.0) -> Redis:
    """A client for `url` that answers in bytes. It connects on first use.

    It repeats nothing behind its user's back: a lost answer becomes Unavailable, and
    the caller knows whether and how long to try again. InvalidSpec for a URL that is none.
    """
    try:
        return Redis.from_url(
            url,
            decode_responses=False,
            protocol=2,
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            client_name="headway",
        )
    except ValueError as error:
        raise InvalidSpec(
            f"not a Redis URL: {redact(url)} ({error}); write redis://HOST:PORT/DB"
        ) from None


async def ping(url: str, timeout_s: float = 1.0) -> None:
    """Returns when the server answers; Unavailable or Unauthorized, in about `timeout_s`."""
    client = connect(url, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await command(client, "PING")
    except TimeoutError:
        raise Unavailable(
            f"Redis at {redact(url)} did not answer within {timeout_s:g} s; is the address right?"
        ) from None
    finally:
        await client.aclose()


async def command(client: Any, *parts: str | bytes | int | float) -> Any:
    """Runs one command and returns its answer; a Redis error becomes a Headway error."""
    try:
        return await client.execute_command(*parts)
    except rex.RedisError as error:
        raise headway_error(error, address(client)) from error


def redact(url: str) -> str:
    """The URL without its password and query, fit for logs and error messages."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(an unreadable URL)"
    if "://" not in url:
        # Without a scheme, anything before an @ may be a secret.
        return url.rpartition("@")[2]
    user = f"{parts.username}@" if parts.username else ""
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return f"{parts.scheme}://{user}{host}{port}{parts.path}"


def address(client: Any) -> str:
    """Where a client's server is, without a password."""
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        return "the Redis cluster"
    settings = pool.connection_kwargs
    if settings.get("path"):
        return f"unix://{settings['path']}"
    scheme = "rediss" if "SSL" in pool.connection_class.__name__ else "redis"
    host, port = settings.get("host", "localhost"), settings.get("port", 6379)
    return f"{scheme}://{host}:{port}/{settings.get('db') or 0}"


_REPLIES: dict[str, type[HeadwayError]] = {
    "VIOLATION": LedgerViolation,
    "CONFLICT": Conflict,
    "NOTFOUND": NotFound,
}
"""First words of the error replies that our own scripts give."""

_PASSING: dict[str, str] = {
    "MISCONF": "cannot write its file: see to the disk that holds it; it takes up again by itself",
    "BUSY": "is busy with a script",
    "NOREPLICAS": "has fewer replicas than it was told to write to",
}
"""First words of the server's own refusals that pass, and what they mean."""


def headway_error(error: rex.RedisError, where: str) -> HeadwayError:
    """The Headway error that says what Redis at `where` refused, and what to do."""
    text = str(error)
    code = text.partition(" ")[0]
    if code in _REPLIES:
        return _REPLIES[code](text.partition(" ")[2])
    if isinstance(error, rex.OutOfMemoryError) or code == "OOM":
        return StoreFull(
            f"Redis at {where} is out of memory: raise its maxmemory, or checkpoint more often"
            " so that payloads are freed"
        )
    if isinstance(error, rex.AuthorizationError | rex.NoPermissionError) or code == "NOPERM":
        return Unauthorized(f"Redis at {where} denies this user the command: {text}")
    if isinstance(error, rex.AuthenticationError) or code in ("NOAUTH", "WRONGPASS"):
        return Unauthorized(
            f"Redis at {where} refused the login: wrong or missing password in the Redis URL"
        )
    if code in _PASSING:
        return Unavailable(f"Redis at {where} {_PASSING[code]}: {text}")
    if isinstance(error, rex.BusyLoadingError):
        return Unavailable(f"Redis at {where} is still loading its data")
    if isinstance(error, rex.ReadOnlyError):
        return Unavailable(f"Redis at {where} is a read-only replica; name the primary")
    if isinstance(error, rex.TimeoutError):
        return Unavailable(f"Redis at {where} did not answer in time")
    if isinstance(error, rex.ConnectionError):
        return Unavailable(f"cannot reach Redis at {where}: {text or 'connection lost'}")
    if isinstance(error, rex.InvalidResponse):
        return Unavailable(f"what answers at {where} is not Redis: {text}")
    return HeadwayError(f"Redis at {where} answered with an error: {text}")
