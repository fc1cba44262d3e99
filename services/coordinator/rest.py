"""REST `/v1`: jobs and the fleet, for people and programs. docs/rest-api.md describes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from headway.diagnosis import DEFAULT_LIMIT_S
from headway.errors import InvalidSpec, Unavailable
from headway.finite import finite
from headway.jobs import JOB_ID, JobRecord, check_job_id, record_to_dict
from headway.schemas import job_schema
from headway.web import make_app
from services.coordinator.body import MAX_BODY_BYTES, parse_submission
from services.coordinator.controller import Coordinator
from services.coordinator.fleet import Node
from services.coordinator.stream import Feed, check_cursor, check_cursors, read_feed, stream
from services.coordinator.waits import look_at

MAX_STREAMS = 200
_MAX_PAGE = 1000
_MAX_KEY = 255
_MAX_LIMIT_S = 1e6
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": job_schema()},
            "application/yaml": {"schema": {"type": "object"}},
        },
    }
}
_KNOWN: dict[int | str, dict[str, Any]] = {200: {"description": "The job was there already"}}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events", "content": {"text/event-stream": {}}}
}

Limit = Annotated[int, Query(ge=1, le=_MAX_PAGE)]
After = Annotated[str, Query(max_length=128)]
LastEventId = Annotated[str, Header(max_length=128)]


def build_app(coordinator: Coordinator, stopping: asyncio.Event) -> FastAPI:
    """The coordinator's HTTP application. Streams end when `stopping` is set."""
    app = make_app(
        "Headway coordinator",
        ready=lambda: coordinator.healthy,
        max_body_bytes=MAX_BODY_BYTES,
    )
    _add_jobs(app, coordinator)
    _add_journals(app, coordinator, stopping)

    @app.get("/v1/fleet")
    async def fleet() -> JSONResponse:
        """Every process of the fleet."""
        now = time.monotonic()
        nodes = coordinator.registry.nodes()
        rows = [_node_row(n, coordinator.registry.silence_s(n.node_id, now)) for n in nodes]
        return JSONResponse({"nodes": rows})

    return app


def _add_jobs(app: FastAPI, coordinator: Coordinator) -> None:
    @app.post("/v1/jobs", status_code=201, openapi_extra=_BODY, responses=_KNOWN)
    async def submit(
        request: Request,
        queue: bool = False,
        job_id: str | None = None,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> Response:
        """Submits a job; 200 when it was there already."""
        if idempotency_key is not None and not 1 <= len(idempotency_key) <= _MAX_KEY:
            raise InvalidSpec(f"Idempotency-Key: 1 to {_MAX_KEY} characters are taken")
        body = await _read_body(request)
        # In a thread: YAML of the greatest size takes seconds, and heartbeats must not wait.
        content_type = request.headers.get("content-type", "")
        submission = await asyncio.to_thread(parse_submission, body, content_type)
        if None not in (job_id, submission.job_id) and job_id != submission.job_id:
            raise InvalidSpec("job_id: the query and the body name different ids")
        wanted = submission.job_id if job_id is None else job_id
        if wanted is not None:
            check_job_id(wanted)
        record, new = await coordinator.submit(submission.spec, wanted, idempotency_key, queue)
        location = {"Location": f"/v1/jobs/{record.job_id}"}
        return JSONResponse(record_to_dict(record), 201 if new else 200, location)

    @app.get("/v1/jobs")
    async def jobs(after: After = "", limit: Limit = 100) -> JSONResponse:
        """Jobs, newest first."""
        records, next_after = await coordinator.store.page(after, limit)
        rows = [record_to_dict(record) for record in records]
        return JSONResponse({"jobs": rows, "next_after": next_after})

    @app.get("/v1/jobs/{job_id}")
    async def job(job_id: str) -> JSONResponse:
        """One job."""
        return JSONResponse(record_to_dict(await _known(coordinator, job_id)))

    @app.get("/v1/jobs/{job_id}/waits")
    async def waits(
        job_id: str,
        limit_s: Annotated[float, Query(gt=0, le=_MAX_LIMIT_S)] = DEFAULT_LIMIT_S,
    ) -> JSONResponse:
        """Who waits for whom; also while Redis is away."""
        known = job_id if JOB_ID.fullmatch(job_id) else ""
        return JSONResponse(finite(await look_at(coordinator, known, limit_s)))

    @app.post("/v1/jobs/{job_id}/cancel")
    async def cancel(job_id: str) -> JSONResponse:
        """Asks for the job's end; safe to repeat."""
        await _known(coordinator, job_id)
        return JSONResponse(record_to_dict(await coordinator.cancel(job_id)))


def _add_journals(app: FastAPI, coordinator: Coordinator, stopping: asyncio.Event) -> None:
    async def rows(
        request: Request, job_id: str, feed: Feed, after: str, limit: int, last_id: str
    ) -> Response:
        if "text/event-stream" in request.headers.get("accept", ""):
            return await live(job_id, (feed,), last_id or after)
        start = check_cursor(after)
        await _known(coordinator, job_id)
        found = await read_feed(coordinator.journal(job_id), feed, start, limit)
        return JSONResponse({"rows": found, "next_after": found[-1]["id"] if found else after})

    num_live = 0

    async def counted(text: AsyncIterator[str]) -> AsyncIterator[str]:
        nonlocal num_live
        num_live += 1
        try:
            async for part in text:
                yield part
        finally:
            num_live -= 1

    async def live(job_id: str, feeds: tuple[Feed, ...], after: str) -> Response:
        cursors = check_cursors(after, len(feeds))
        await _known(coordinator, job_id)
        if num_live >= MAX_STREAMS:  # each asks Redis four times a second
            raise Unavailable(f"{MAX_STREAMS} streams are open: close some, or read in pages")
        text = counted(stream(coordinator, job_id, feeds, cursors, stopping))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(text, media_type="text/event-stream", headers=headers)

    @app.get("/v1/jobs/{job_id}/events")
    async def events(
        request: Request,
        job_id: str,
        after: After = "",
        limit: Limit = 100,
        last_event_id: LastEventId = "",
    ) -> Response:
        """What happened, oldest first; with `Accept: text/event-stream` as it happens."""
        return await rows(request, job_id, "event", after, limit, last_event_id)

    @app.get("/v1/jobs/{job_id}/metrics")
    async def metrics(
        request: Request,
        job_id: str,
        after: After = "",
        limit: Limit = 100,
        last_event_id: LastEventId = "",
    ) -> Response:
        """One row a step, oldest first; with `Accept: text/event-stream` as they come."""
        return await rows(request, job_id, "metrics", after, limit, last_event_id)

    @app.get("/v1/jobs/{job_id}/stream", response_class=StreamingResponse, responses=_STREAM)
    async def both(job_id: str, after: After = "", last_event_id: LastEventId = "") -> Response:
        """Events and metrics as they come, as server-sent events."""
        return await live(job_id, ("event", "metrics"), last_event_id or after)


async def _known(coordinator: Coordinator, job_id: str) -> JobRecord:
    return await coordinator.store.get(job_id if JOB_ID.fullmatch(job_id) else "")


async def _read_body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise InvalidSpec("the body broke off") from None


def _node_row(node: Node, silence_s: float) -> dict[str, Any]:
    row = asdict(node)
    row["jobs"] = row.pop("reports")
    row["heard"] = row.pop("heard_at") is not None
    del row["changed_at"]
    row["silence_s"] = round(silence_s, 3)
    return row
