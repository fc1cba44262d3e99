"""The coordinator's REST API as its clients speak it: paths, requests, answers, streams."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import httpx

from headway import errors
from headway.access.identity import own_token
from headway.errors import HeadwayError, InvalidSpec, NotFound, Unavailable
from headway.jobs import JOB_ID
from headway.jobspec import JobSpec
from headway.ports import is_loopback

Row = dict[str, Any]
TIMEOUT = httpx.Timeout(10.0, connect=3.0)
# The server sends a comment at least every 10 s; a silent stream is a dead one.
STREAM_TIMEOUT = httpx.Timeout(30.0, connect=3.0)
RETRY_PAUSE_S = 0.3
_BY_KIND = {
    cls.kind: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, HeadwayError)
}


@dataclass(frozen=True, slots=True)
class JobUpdate:
    """One thing that happened in a job: an event row or a metrics row (one a step).

    `cursor` resumes the stream after this update.
    """

    kind: Literal["event", "metrics"]
    row: Row
    cursor: str


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of a list, oldest first, and the cursor after the last of them."""

    rows: Sequence[Row]
    next_after: str


class StreamReader:
    """Reads one job's server-sent events over as many connections as it takes."""

    def __init__(self, job_id: str, after: str, patience_s: float) -> None:
        self.path = job_path(job_id, "stream")
        self.ended = False
        self._cursor = after
        self._patience_s = patience_s
        self._away_since: float | None = None
        self._fields: dict[str, str] = {}

    def headers(self) -> dict[str, str]:
        """Headers that resume after the last update read."""
        self._fields = {}
        resume = {"Last-Event-ID": self._cursor} if self._cursor else {}
        return {"Accept": "text/event-stream", **resume}

    def updates(self, lines: Iterable[str]) -> Iterator[JobUpdate]:
        """The updates in these lines; an unfinished one waits for more lines."""
        for line in lines:
            self._away_since = None
            if line:
                name, _, value = line.partition(":")
                self._fields[name] = value.removeprefix(" ")
                continue
            fields, self._fields = self._fields, {}
            kind = fields.get("event")
            if kind == "end":
                self.ended = True
            elif kind in ("event", "metrics"):
                with understood(self.path):
                    self._cursor, row = fields["id"], dict(json.loads(fields["data"]))
                yield JobUpdate(kind, row, self._cursor)  # type: ignore[arg-type]

    def broken(self, url: str, error: Exception) -> None:
        """Raises Unavailable when no connection gave a line since one broke too long ago.

        Time in which the caller was busy with an update does not count.
        """
        if self._away_since is None:
            self._away_since = time.monotonic()
        if time.monotonic() - self._away_since > self._patience_s:
            raise unreachable(url, error) from None


def checked_url(url: str) -> httpx.URL:
    """The URL of a coordinator; InvalidSpec when it is none."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidSpec(f"{url!r} is not the URL of a coordinator: {error}") from None
    port_is_one = parsed.port is None or 0 < parsed.port < 65536
    if parsed.scheme not in ("http", "https") or not parsed.host or not port_is_one:
        raise InvalidSpec(f"{url!r} is not the URL of a coordinator: write http://HOST:PORT")
    return parsed


def client_options(url: str, token: str | None) -> dict[str, Any]:
    """What both clients' connections have in common; see HeadwayClient for the token.

    InvalidSpec for a URL that is none, or a token or CA file that cannot be used.
    """
    shown = own_token() if token is None else token
    where = checked_url(url)
    return {
        "base_url": where,
        "trust_env": not is_loopback(where.host),  # a proxy leads to another machine's loopback
        "headers": {"Authorization": f"Bearer {shown}"} if shown else {},
        "timeout": TIMEOUT,
        "verify": _believed(),
        # A token must not follow a redirect to another host.
        "follow_redirects": False,
    }


def _believed() -> ssl.SSLContext | bool:
    ca = os.environ.get("HEADWAY_TLS_CA", "")
    if not ca:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSpec(f"HEADWAY_TLS_CA {ca}: {error}") from None


def job_path(job_id: str, room: str = "") -> str:
    """The path of a job or of a room in it. NotFound for what cannot be a job id."""
    if not JOB_ID.fullmatch(job_id):  # nor may it be read as a part of the path
        raise NotFound(f"no job {job_id[:80]!r}")
    return f"/v1/jobs/{job_id}/{room}" if room else f"/v1/jobs/{job_id}"


def submit_request(
    spec: JobSpec | Mapping[str, Any], job_id: str | None, queue: bool, key: str | None
) -> dict[str, Any]:
    """The arguments of the request that submits a job."""
    body = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)
    if job_id is not None:
        body["job_id"] = job_id
    return {
        "method": "POST",
        "path": "/v1/jobs",
        "params": {"queue": "true"} if queue else {},
        "headers": {"Idempotency-Key": key} if key else {},
        "json": body,
    }


def decode(answer: httpx.Response) -> Row:
    """The object that was answered, or the error that it names."""
    if answer.is_error:
        raise_for(answer)
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Unavailable(f"{answer.url} answered {answer.status_code}, but not as Headway does")
    return body


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Unavailable when what was answered lacks what a coordinator answers: it is none."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Unavailable(f"what answers at {where} is no coordinator of this version") from None


def raise_for(answer: httpx.Response) -> NoReturn:
    """Raises the error that an answer names."""
    try:
        error = answer.json()["error"]
        kind, message = str(error["kind"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        raise Unavailable(
            f"{answer.url} answered {answer.status_code}, but not as Headway does"
        ) from None
    raise _BY_KIND.get(kind, HeadwayError)(message)


def unreachable(url: str, error: Exception) -> Unavailable:
    """The error for a coordinator that does not answer."""
    reason = str(error) or type(error).__name__
    return Unavailable(f"no coordinator answers at {url}: {reason}")
