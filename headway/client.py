"""The Python client of the coordinator's REST API, in a blocking and an async form.

    with HeadwayClient("http://127.0.0.1:8700") as client:
        job = client.submit(load_job(Path("job.yaml")))
        for update in client.follow(job.job_id):
            print(update.kind, update.row)

Errors are those of `headway.errors`; Unavailable when nothing answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Self

import httpx

from headway.diagnosis import DEFAULT_LIMIT_S
from headway.errors import Unavailable
from headway.jobs import JobRecord, record_from_dict
from headway.jobspec import JobSpec
from headway.rest import (
    RETRY_PAUSE_S,
    STREAM_TIMEOUT,
    JobUpdate,
    Page,
    Row,
    StreamReader,
    client_options,
    decode,
    job_path,
    raise_for,
    submit_request,
    understood,
    unreachable,
)

__all__ = ["AsyncHeadwayClient", "HeadwayClient", "JobUpdate", "Page", "Row"]


class HeadwayClient:
    """Blocking client. Safe to use from one thread at a time; close it, or use `with`."""

    def __init__(
        self, url: str, token: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        """`token`: by default that of HEADWAY_TOKEN, or of the file HEADWAY_TOKEN_FILE names.

        An https server's certificate is checked against HEADWAY_TLS_CA where that is set.
        """
        self._url = url
        self._http = httpx.Client(**client_options(url, token), transport=transport)

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
        return self._record(**submit_request(spec, job_id, queue, idempotency_key))

    def job(self, job_id: str) -> JobRecord:
        """One job as it stands. NotFound when there is none of this id."""
        return self._record("GET", job_path(job_id))

    def jobs(self) -> list[JobRecord]:
        """All jobs, newest first."""
        records: list[JobRecord] = []
        after = ""
        while True:
            page = self._call("GET", "/v1/jobs", params={"after": after, "limit": 200})
            with understood(self._url):
                records += [record_from_dict(row) for row in page["jobs"]]
                after = str(page["next_after"])
            if not after:
                return records

    def events(self, job_id: str, after: str = "", limit: int = 1000) -> Page:
        """Events after a cursor ("" for the beginning), oldest first."""
        return self._page(job_path(job_id, "events"), after, limit)

    def metrics(self, job_id: str, after: str = "", limit: int = 1000) -> Page:
        """Metrics rows after a cursor ("" for the beginning), one a step."""
        return self._page(job_path(job_id, "metrics"), after, limit)

    def cancel(self, job_id: str) -> JobRecord:
        """Asks for the job's end; safe to repeat. Conflict when it succeeded or failed."""
        return self._record("POST", job_path(job_id, "cancel"))

    def waits(self, job_id: str, limit_s: float = DEFAULT_LIMIT_S) -> Row:
        """Who waits for whom: findings, and what they were made from; docs/rest-api.md.

        A wait beyond `limit_s` seconds makes the job unhealthy.
        """
        return self._call("GET", job_path(job_id, "waits"), params={"limit_s": limit_s})

    def fleet(self) -> Row:
        """The processes of the fleet: `{"nodes": [...]}`; docs/rest-api.md has the fields."""
        return self._call("GET", "/v1/fleet")

    def follow(self, job_id: str, after: str = "", patience_s: float = 30.0) -> Iterator[JobUpdate]:
        """Every event and metrics row until the job has ended, live, none lost, none twice.

        A broken connection is taken up again where it broke. Unavailable when the
        coordinator stays away for `patience_s`.
        """
        reader = StreamReader(job_id, after, patience_s)
        while not reader.ended:
            try:
                with self._http.stream(
                    "GET", reader.path, headers=reader.headers(), timeout=STREAM_TIMEOUT
                ) as answer:
                    if answer.is_error:
                        answer.read()
                        raise_for(answer)
                    yield from reader.updates(answer.iter_lines())
            except (httpx.RequestError, Unavailable) as error:
                reader.broken(self._url, error)
            if not reader.ended:
                time.sleep(RETRY_PAUSE_S)

    def _page(self, path: str, after: str, limit: int) -> Page:
        page = self._call("GET", path, params={"after": after, "limit": limit})
        with understood(self._url):
            return Page([dict(row) for row in page["rows"]], str(page["next_after"]))

    def _record(self, method: str, path: str, **request: Any) -> JobRecord:
        row = self._call(method, path, **request)
        with understood(self._url):
            return record_from_dict(row)

    def _call(self, method: str, path: str, **request: Any) -> Row:
        try:
            return decode(self._http.request(method, path, **request))
        except httpx.RequestError as error:
            raise unreachable(self._url, error) from None


class AsyncHeadwayClient:
    """The same client for asyncio; see HeadwayClient for what each call does."""

    def __init__(
        self, url: str, token: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """See HeadwayClient."""
        self._url = url
        self._http = httpx.AsyncClient(**client_options(url, token), transport=transport)

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
        return await self._record(**submit_request(spec, job_id, queue, idempotency_key))

    async def job(self, job_id: str) -> JobRecord:
        """One job as it stands. NotFound when there is none of this id."""
        return await self._record("GET", job_path(job_id))

    async def jobs(self) -> list[JobRecord]:
        """All jobs, newest first."""
        records: list[JobRecord] = []
        after = ""
        while True:
            page = await self._call("GET", "/v1/jobs", params={"after": after, "limit": 200})
            with understood(self._url):
                records += [record_from_dict(row) for row in page["jobs"]]
                after = str(page["next_after"])
            if not after:
                return records

    async def events(self, job_id: str, after: str = "", limit: int = 1000) -> Page:
        """Events after a cursor ("" for the beginning), oldest first."""
        return await self._page(job_path(job_id, "events"), after, limit)

    async def metrics(self, job_id: str, after: str = "", limit: int = 1000) -> Page:
        """Metrics rows after a cursor ("" for the beginning), one a step."""
        return await self._page(job_path(job_id, "metrics"), after, limit)

    async def cancel(self, job_id: str) -> JobRecord:
        """Asks for the job's end; safe to repeat. Conflict when it succeeded or failed."""
        return await self._record("POST", job_path(job_id, "cancel"))

    async def waits(self, job_id: str, limit_s: float = DEFAULT_LIMIT_S) -> Row:
        """Who waits for whom; see HeadwayClient.waits."""
        return await self._call("GET", job_path(job_id, "waits"), params={"limit_s": limit_s})

    async def fleet(self) -> Row:
        """The processes of the fleet; see HeadwayClient.fleet."""
        return await self._call("GET", "/v1/fleet")

    async def follow(
        self, job_id: str, after: str = "", patience_s: float = 30.0
    ) -> AsyncIterator[JobUpdate]:
        """Every event and metrics row until the job has ended; see HeadwayClient.follow."""
        reader = StreamReader(job_id, after, patience_s)
        while not reader.ended:
            try:
                async with self._http.stream(
                    "GET", reader.path, headers=reader.headers(), timeout=STREAM_TIMEOUT
                ) as answer:
                    if answer.is_error:
                        await answer.aread()
                        raise_for(answer)
                    async for line in answer.aiter_lines():
                        for update in reader.updates([line]):
                            yield update
            except (httpx.RequestError, Unavailable) as error:
                reader.broken(self._url, error)
            if not reader.ended:
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _page(self, path: str, after: str, limit: int) -> Page:
        page = await self._call("GET", path, params={"after": after, "limit": limit})
        with understood(self._url):
            return Page([dict(row) for row in page["rows"]], str(page["next_after"]))

    async def _record(self, method: str, path: str, **request: Any) -> JobRecord:
        row = await self._call(method, path, **request)
        with understood(self._url):
            return record_from_dict(row)

    async def _call(self, method: str, path: str, **request: Any) -> Row:
        try:
            return decode(await self._http.request(method, path, **request))
        except httpx.RequestError as error:
            raise unreachable(self._url, error) from None
