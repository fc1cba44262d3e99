"""Redis URLs: what is refused, what is shown, which error it becomes."""

from __future__ import annotations

import socket

import pytest
import redis.exceptions as rex

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
from headway.redis_client import address, connect, headway_error, ping, redact


@pytest.mark.parametrize(
    "url, shown",
    [
        ("redis://:s3cret@10.0.0.1:6379/2", "redis://10.0.0.1:6379/2"),
        ("redis://user:s3cret@host/0", "redis://user@host/0"),
        ("rediss://host:1/0?password=s3cret", "rediss://host:1/0"),
        ("redis://:s3cret@[::1]:7/0", "redis://[::1]:7/0"),
        ("unix://:s3cret@/run/redis.sock", "unix:///run/redis.sock"),
        ("user:s3cret@host", "host"),
        ("redis://:s3cret@host:port/0", "(an unreadable URL)"),
    ],
)
def test_redact_hides_the_password(url, shown):
    assert redact(url) == shown


@pytest.mark.parametrize("url", ["localhost:6379", "http://:s3cret@host", "redis://host:port/0"])
def test_what_is_no_redis_url_is_refused(url):
    with pytest.raises(InvalidSpec, match="not a Redis URL") as caught:
        connect(url)
    assert "s3cret" not in str(caught.value)


async def test_nobody_there_is_unavailable():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound, not listening: refused at once
        port = probe.getsockname()[1]
        with pytest.raises(Unavailable, match=f"cannot reach Redis at redis://127.0.0.1:{port}/3"):
            await ping(f"redis://:s3cret@127.0.0.1:{port}/3")


def test_the_address_of_a_client_shows_no_password():
    assert address(connect("redis://:s3cret@host:7/1")) == "redis://host:7/1"
    assert address(connect("rediss://:s3cret@host/0")) == "rediss://host:6379/0"
    assert address(connect("unix:///run/redis.sock")) == "unix:///run/redis.sock"


@pytest.mark.parametrize(
    "error, kind, says",
    [
        (rex.ResponseError("VIOLATION step 3 is odd"), LedgerViolation, "^step 3 is odd$"),
        (rex.ResponseError("CONFLICT other"), Conflict, "^other$"),
        (rex.ResponseError("NOTFOUND it"), NotFound, "^it$"),
        (rex.OutOfMemoryError("command not allowed"), StoreFull, "out of memory"),
        (rex.ResponseError("OOM command not allowed"), StoreFull, "out of memory"),
        (rex.AuthenticationError("invalid username-password pair"), Unauthorized, "password"),
        (rex.ResponseError("NOAUTH Authentication required."), Unauthorized, "password"),
        (rex.NoPermissionError("NOPERM no evalsha"), Unauthorized, "denies"),
        (rex.BusyLoadingError("loading"), Unavailable, "still loading"),
        (rex.ReadOnlyError("replica"), Unavailable, "name the primary"),
        (rex.TimeoutError("slow"), Unavailable, "in time"),
        (rex.ConnectionError("refused"), Unavailable, "cannot reach Redis at HERE: refused"),
        (rex.InvalidResponse("Protocol error, got '<'"), Unavailable, "HERE is not Redis"),
        (rex.ResponseError("WRONGTYPE of key"), HeadwayError, "WRONGTYPE"),
    ],
)
def test_redis_errors_become_ours(error, kind, says):
    ours = headway_error(error, "HERE")
    assert type(ours) is kind
    with pytest.raises(kind, match=says):
        raise ours
