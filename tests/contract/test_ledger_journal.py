"""The journal on both servers: order, pages, waiting, and numbers that JSON lacks."""

from __future__ import annotations

import math

import pytest

from headway.errors import InvalidSpec, Unavailable
from headway.journal import Journal
from headway.redis_client import command, connect


@pytest.fixture
async def client(store_url):
    client = connect(store_url)
    yield client
    await client.aclose()


@pytest.fixture
def journal(client, job_id):
    return Journal(client, job_id)


async def test_events_come_back_in_order_and_in_pages(journal):
    written = [await journal.append_event("running", f"step {i}", step=i) for i in range(5)]
    everything = await journal.read_events()
    assert [row["id"] for row in everything] == written
    assert {k: v for k, v in everything[3].items() if k not in ("id", "time")} == {
        "kind": "running",
        "message": "step 3",
        "step": 3,
    }
    first = await journal.read_events(limit=2)
    second = await journal.read_events(first[-1]["id"], limit=2)
    last = await journal.read_events(second[-1]["id"], limit=2)
    assert first + second + last == everything
    assert await journal.read_events(written[-1]) == []
    assert await journal.read_metrics() == []


async def test_an_events_time_is_the_stores(client, journal):
    before = int((await command(client, "TIME"))[0])
    await journal.append_event("submitted", "job")
    after = int((await command(client, "TIME"))[0]) + 1
    (event,) = await journal.read_events()
    assert before <= event["time"] <= after
    assert event["time"] == int(event["id"].partition("-")[0]) / 1000


async def test_metrics_keep_their_names_and_lose_only_what_json_lacks(journal):
    row = {
        "actor/pg_loss": math.nan,
        "actor/grad_norm": math.inf,
        "time": 12.5,
        "lag/max": 2,
        "nested": {"values": [1.0, -math.inf], 3: None},
        "flag": True,
        "text": "ä\n",
    }
    await journal.append_metrics(7, row)
    (read,) = await journal.read_metrics()
    del read["id"]
    assert read == {
        "actor/pg_loss": None,
        "actor/grad_norm": None,
        "time": 12.5,
        "lag/max": 2,
        "nested": {"values": [1.0, None], "3": None},
        "flag": True,
        "text": "ä\n",
        "step": 7,
    }


async def test_what_json_cannot_say_is_refused(journal):
    with pytest.raises(TypeError):
        await journal.append_metrics(1, {"tensor": object()})
    assert await journal.read_metrics() == []


@pytest.mark.parametrize("after", ["", "yesterday", "+", "1-2-3", "(0-0"])
async def test_a_malformed_position_is_refused(journal, after):
    for read in (journal.read_events, journal.read_metrics):
        with pytest.raises(InvalidSpec, match="not the id"):
            await read(after)
    with pytest.raises(InvalidSpec, match="limit"):
        await journal.read_events(limit=0)


async def test_jobs_do_not_see_each_other(client, journal, job_id):
    await journal.append_event("submitted", "mine")
    assert await Journal(client, job_id + "x").read_events() == []


async def test_a_journal_without_a_server_is_unavailable():
    client = connect("redis://127.0.0.1:1/0")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await Journal(client, "job").append_event("submitted", "x")
    await client.aclose()
