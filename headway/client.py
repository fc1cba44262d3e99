"""The Python client of the coordinator's REST API, in a blocking and an async form.

    with HeadwayClient("http://127.0.0.1:8080") as client:
        job = client.submit(load_job(Path("job.yaml")))
        for update in client.follow(job.job_id):
            print(update.kind, update.row)

Errors are those of `headway.errors`; Unavailable when nothing answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import httpx

from headway import errors
from headway.errors import HeadwayError, InvalidSpec, NotFound, Unavailable
from headway.jobs import JOB_ID, JobRecord, record_from_dict
from headway.jobspec import JobSpec

Row = dict[str, Any]
_TIMEOUT = httpx.Timeout(10.0, connect=3.0)
# The server sends a comment at least every 10 s; a silent stream is a dead one.
_STREAM_TIMEOUT = httpx.Timeout(30.0, connect=3.0)
_RETRY_PAUSE_S = 0.3
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


class HeadwayClient:
    """Blocking client. Safe to use from one thread at a time; close it, or use `with`."""

    def __init__(
        self, url: str, token: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._url = url
        self._http = httpx.Client(
            base_url=_checked(url), headers=_headers(token), timeout=_TIMEOUT, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def submit(
        self,
        spec: JobSpec | Mapping[str, Any],
        job_id: str | None = None,
        queue: bool = False,
        idempotency_key: str | None = None,
    ) -> JobRecord:
        """Submits a job; the same id (or key) and spec again give the same job.

        InvalidSpec names every fault; NoCapacity says what the fleet lacks (unless
        `queue`, then the job waits for it); Conflict when the id has another spec.
        """
        return record_from_dict(self._call(**_submit(spec, job_id, queue, idempotency_key)))

    def job(self, job_id: str) -> JobRecord:
        """One job as it stands. NotFound when there is none of this id."""
        return record_from_dict(self._call("GET", _job_path(job_id)))

    def jobs(self) -> list[JobRecord]:
        """All jobs, newest first."""
        records: list[JobRecord] = []
        after = ""
        while True:
            page = self._call("GET", "/v1/jobs", params={"after": after, "limit": 200})
            records += [record_from_dict(row) for row in page["jobs"]]
            if not (after := page["next_after"]):
                return records

    def events(self, job_id: str, after: str = "", limit: int = 1000) -> Page:
        """Events after a cursor ("" for the beginning), oldest first."""
        return self._page(_job_path(job_id, "events"), after, limit)

    def metrics(self, job_id: str, after: str = "", limit: int = 1000) -> Page:
        """Metrics rows after a cursor ("" for the beginning), one a step."""
        return self._page(_job_path(job_id, "metrics"), after, limit)

    def cancel(self, job_id: str) -> JobRecord:
        """Asks for the job's end; safe to repeat. Conflict when it succeeded or failed."""
        return record_from_dict(self._call("POST", _job_path(job_id, "cancel")))

    def fleet(self) -> Row:
        """The processes of the fleet: `{"nodes": [...]}`; docs/rest-api.md has the fields."""
        return self._call("GET", "/v1/fleet")

    def follow(self, job_id: str, after: str = "", patience_s: float = 30.0) -> Iterator[JobUpdate]:
        """Every event and metrics row until the job has ended, live, none lost, none twice.

        A broken connection is taken up again where it broke. Unavailable when the
        coordinator stays away for `patience_s`.
        """
        reader = _StreamReader(job_id, after, patience_s)
        while not reader.ended:
            try:
                with self._http.stream(
                    "GET", reader.path, headers=reader.headers(), timeout=_STREAM_TIMEOUT
                ) as answer:
                    if answer.is_error:
                        answer.read()
                        _raise(answer)
                    yield from reader.updates(answer.iter_lines())
            except (httpx.TransportError, Unavailable) as error:
                reader.broken(self._url, error)
            if not reader.ended:
                time.sleep(_RETRY_PAUSE_S)

    def _page(self, path: str, after: str, limit: int) -> Page:
        page = self._call("GET", path, params={"after": after, "limit": limit})
        return Page(page["rows"], page["next_after"])

    def _call(self, method: str, path: str, **request: Any) -> Row:
        try:
            return _decode(self._http.request(method, path, **request))
        except httpx.TransportError as error:
            raise _unreachable(self._url, error) from None


class AsyncHeadwayClient:
    """The same client for asyncio; see HeadwayClient for what each call does."""

    def __init__(
        self, url: str, token: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._url = url
        self._http = httpx.AsyncClient(
            base_url=_checked(url), headers=_headers(token), timeout=_TIMEOUT, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def submit(
        self,
        spec: JobSpec | Mapping[str, Any],
        job_id: str | None = None,
        queue: bool = False,
        idempotency_key: str | None = None,
    ) -> JobRecord:
        """Submits a job; see HeadwayClient.submit."""
        return record_from_dict(await self._call(**_submit(spec, job_id, queue, idempotency_key)))

    async def job(self, job_id: str) -> JobRecord:
        """One job as it stands. NotFound when there is none of this id."""
        return record_from_dict(await self._call("GET", _job_path(job_id)))

    async def jobs(self) -> list[JobRecord]:
        """All jobs, newest first."""
        records: list[JobRecord] = []
        after = ""
        while True:
            page = await self._call("GET", "/v1/jobs", params={"after": after, "limit": 200})
            records += [record_from_dict(row) for row in page["jobs"]]
            if not (after := page["next_after"]):
                return records

    async def events(self, job_id: str, after: str = "", limit: int = 1000) -> Page:
        """Events after a cursor ("" for the beginning), oldest first."""
        return await self._page(_job_path(job_id, "events"), after, limit)

    async def metrics(self, job_id: str, after: str = "", limit: int = 1000) -> Page:
        """Metrics rows after a cursor ("" for the beginning), one a step."""
        return await self._page(_job_path(job_id, "metrics"), after, limit)

    async def cancel(self, job_id: str) -> JobRecord:
        """Asks for the job's end; safe to repeat. Conflict when it succeeded or failed."""
        return record_from_dict(await self._call("POST", _job_path(job_id, "cancel")))

    async def fleet(self) -> Row:
        """The processes of the fleet; see HeadwayClient.fleet."""
        return await self._call("GET", "/v1/fleet")

    async def follow(
        self, job_id: str, after: str = "", patience_s: float = 30.0
    ) -> AsyncIterator[JobUpdate]:
        """Every event and metrics row until the job has ended; see HeadwayClient.follow."""
        reader = _StreamReader(job_id, after, patience_s)
        while not reader.ended:
            try:
                async with self._http.stream(
                    "GET", reader.path, headers=reader.headers(), timeout=_STREAM_TIMEOUT
                ) as answer:
                    if answer.is_error:
                        await answer.aread()
                        _raise(answer)
                    async for line in answer.aiter_lines():
                        for update in reader.updates([line]):
                            yield update
            except (httpx.TransportError, Unavailable) as error:
                reader.broken(self._url, error)
            if not reader.ended:
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _page(self, path: str, after: str, limit: int) -> Page:
        page = await self._call("GET", path, params={"after": after, "limit": limit})
        return Page(page["rows"], page["next_after"])

    async def _call(self, method: str, path: str, **request: Any) -> Row:
        try:
            return _decode(await self._http.request(method, path, **request))
        except httpx.TransportError as error:
            raise _unreachable(self._url, error) from None


class _StreamReader:
    """Reads one job's server-sent events over as many connections as it takes."""

    def __init__(self, job_id: str, after: str, patience_s: float) -> None:
        self.path = _job_path(job_id, "stream")
        self.ended = False
        self._cursor = after
        self._patience_s = patience_s
        self._last_line = time.monotonic()
        self._fields: dict[str, str] = {}

    def headers(self) -> dict[str, str]:
        """Headers that resume after the last update read."""
        self._fields = {}
        resume = {"Last-Event-ID": self._cursor} if self._cursor else {}
        return {"Accept": "text/event-stream", **resume}

    def updates(self, lines: Iterable[str]) -> Iterator[JobUpdate]:
        """The updates in these lines; an unfinished one waits for more lines."""
        for line in lines:
            self._last_line = time.monotonic()
            if line:
                name, _, value = line.partition(":")
                self._fields[name] = value.removeprefix(" ")
                continue
            fields, self._fields = self._fields, {}
            kind = fields.get("event")
            if kind == "end":
                self.ended = True
            elif kind in ("event", "metrics"):
                self._cursor = fields["id"]
                yield JobUpdate(kind, json.loads(fields["data"]), self._cursor)  # type: ignore[arg-type]

    def broken(self, url: str, error: Exception) -> None:
        """Raises Unavailable when nothing was read for too long."""
        if time.monotonic() - self._last_line > self._patience_s:
            raise _unreachable(url, error) from None


def _checked(url: str) -> httpx.URL:
    try:
        return httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidSpec(f"{url!r} is not the URL of a coordinator: {error}") from None


def _headers(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _job_path(job_id: str, room: str = "") -> str:
    if not JOB_ID.fullmatch(job_id):  # nor may it be read as a part of the path
        raise NotFound(f"no job {job_id[:80]!r}")
    return f"/v1/jobs/{job_id}/{room}" if room else f"/v1/jobs/{job_id}"


def _submit(
    spec: JobSpec | Mapping[str, Any], job_id: str | None, queue: bool, key: str | None
) -> dict[str, Any]:
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


def _decode(answer: httpx.Response) -> Row:
    if answer.is_error:
        _raise(answer)
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Unavailable(f"{answer.url} answered {answer.status_code}, but not as Headway does")
    return body


def _raise(answer: httpx.Response) -> None:
    try:
        error = answer.json()["error"]
        kind, message = str(error["kind"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        raise Unavailable(
            f"{answer.url} answered {answer.status_code}, but not as Headway does"
        ) from None
    raise _BY_KIND.get(kind, HeadwayError)(message)


def _unreachable(url: str, error: Exception) -> Unavailable:
    reason = str(error) or type(error).__name__
    return Unavailable(f"no coordinator answers at {url}: {reason}")
