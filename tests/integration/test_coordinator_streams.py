"""What the coordinator tells: streams that resume, lists in pages, the blocking client."""

import asyncio
import json
from contextlib import AsyncExitStack

import httpx
import pytest

from headway.client import HeadwayClient
from headway.errors import NotFound, Unavailable
from headway.jobspec import parse_job
from headway.web import serve_http
from services.coordinator import rest
from services.coordinator.controller import Coordinator
from services.coordinator.fleet import FleetRegistry
from services.coordinator.store import JobStore
from tests.support.coordinator import small_fleet
from tests.support.fleet import SPEC, emptied, eventually, own_db


async def test_a_stream_resumes_after_any_id_and_closes_at_the_end(client, nodes, http):
    learner, *_ = await small_fleet(nodes)
    await client.submit(SPEC, "j")
    await learner.work("j")
    learner.say("j", "succeeded", version=3)
    await learner.beat()
    whole = await messages(http, "/v1/jobs/j/events")
    assert [m["event"] for m in whole] == ["event"] * 4 + ["end"]
    assert [json.loads(m["data"])["kind"] for m in whole[:4]] == [
        "submitted", "assigned", "starting", "succeeded",
    ]  # fmt: skip
    assert json.loads(whole[-1]["data"])["state"] == "succeeded"
    for place in range(5):
        after = {"Last-Event-ID": whole[place]["id"]}
        rest = await messages(http, "/v1/jobs/j/events", after)
        assert rest == whole[place + 1 :] or (place == 4 and rest == whole[4:])
    pages = (await http.get("/v1/jobs/j/events", params={"limit": 3})).json()
    rest = (await http.get("/v1/jobs/j/events", params={"after": pages["next_after"]})).json()
    ids = [row["id"] for row in pages["rows"] + rest["rows"]]
    assert ids == [m["id"] for m in whole[:4]]
    assert (await messages(http, "/v1/jobs/j/metrics"))[-1]["event"] == "end"


async def messages(http, path, headers=None):
    """The messages of a stream that ends by itself."""
    headers = {"Accept": "text/event-stream", **(headers or {})}
    answer = await http.get(path, headers=headers, timeout=20)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [b for b in answer.text.split("\n\n") if b and not b.startswith((":", "retry"))]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


async def test_lists_are_paged_newest_first(client, http):
    for number in range(5):
        await client.submit(SPEC, f"j{number}", queue=True)
    seen, after = [], ""
    while True:
        page = (await http.get("/v1/jobs", params={"limit": 2, "after": after})).json()
        seen += [row["job_id"] for row in page["jobs"]]
        if not (after := page["next_after"]):
            break
    assert seen == ["j4", "j3", "j2", "j1", "j0"]


async def test_the_blocking_client_does_the_same(coordinator, nodes, client):
    learner, *_ = await small_fleet(nodes)

    def use() -> tuple:
        with HeadwayClient(coordinator.url) as blocking:
            record = blocking.submit(parse_job(SPEC), "j")
            updates = list(blocking.follow("j"))
            return record, updates, blocking.job("j"), blocking.jobs()

    using = asyncio.create_task(asyncio.to_thread(use))
    await learner.work("j")
    learner.say("j", "succeeded", version=3)
    await learner.beat()
    record, updates, last, jobs = await using
    assert (record.job_id, last.state, [j.job_id for j in jobs]) == ("j", "succeeded", ["j"])
    assert [u.row["kind"] for u in updates] == ["submitted", "assigned", "starting", "succeeded"]


def test_the_blocking_client_when_nobody_is_there():
    with HeadwayClient("http://127.0.0.1:1") as client:
        for call in (
            client.jobs,
            client.fleet,
            lambda: client.job("j"),
            lambda: client.submit(SPEC),
        ):
            with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1"):
                call()
        with pytest.raises(Unavailable):
            list(client.follow("j", patience_s=0.0))
        with pytest.raises(NotFound):
            client.job("../fleet")


async def test_more_streams_than_redis_should_be_asked_for_are_refused(redis_url, monkeypatch):
    monkeypatch.setattr(rest, "MAX_STREAMS", 2)
    stopping = asyncio.Event()
    async with emptied(own_db(redis_url)) as redis:
        coordinator = Coordinator(JobStore(redis), FleetRegistry(60.0))
        await coordinator.submit(parse_job(SPEC), "j", None, queue=True)
        app = rest.build_app(coordinator, stopping)
        async with (
            serve_http(app, "127.0.0.1", 0) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
        ):
            async with AsyncExitStack() as open_streams:
                read = []  # kept: a reader that is forgotten hangs up
                for _ in range(2):
                    answer = await open_streams.enter_async_context(
                        http.stream("GET", "/v1/jobs/j/stream")
                    )
                    read.append(answer.aiter_lines())
                    assert await anext(read[-1]) == "retry: 500"
                refused = await http.get("/v1/jobs/j/stream")
                assert refused.status_code == 503
                assert "2 streams are open" in refused.json()["error"]["message"]
            stopping.set()

            async def free():
                async with http.stream("GET", "/v1/jobs/j/stream") as answer:
                    return answer.status_code == 200

            await eventually(free)
