"""Jobs in Redis when something else has written there, on real servers."""

import pytest
from redis.exceptions import ResponseError

from headway.errors import Conflict, StoreFull, Unavailable
from headway.jobs import JobRecord
from headway.ledger.keys import job_key
from headway.redis_client import command, connect, headway_error
from services.coordinator.store import ACTIVE_JOBS, ALL_JOBS, JobStore
from tests.support.fleet import RESOLVED

DAMAGED = (b"", b"{}", b"[]", b"\xff", b"[" * 5000, b'{"job_id": "x"}')


@pytest.fixture
async def redis(store_url):
    client = connect(store_url)
    yield client
    await client.aclose()


async def listed(redis, job_id):
    for index in (ALL_JOBS, ACTIVE_JOBS):
        await command(redis, "ZADD", index, 1.0, job_id)


async def unlist(redis, *job_ids):
    for index in (ALL_JOBS, ACTIVE_JOBS):
        await command(redis, "ZREM", index, *job_ids)


@pytest.mark.parametrize("damaged", DAMAGED)
async def test_a_damaged_record_costs_no_other_job(redis, job_id, damaged):
    store, bad = JobStore(redis), f"{job_id}-bad"
    record, _ = await store.create(JobRecord(job_id, RESOLVED, "digest", 1.0, 1.0))
    await command(redis, "SET", job_key(bad, "record"), damaged)
    await listed(redis, bad)
    try:
        assert record in await store.active()
        assert record in (await store.page("", 1000))[0]
        said = f"the record of job '{bad}' in Redis is damaged .*delete it"
        with pytest.raises(Conflict, match=said):
            await store.get(bad)
        with pytest.raises(Conflict, match=said):
            await store.update(bad, lambda _: None)
    finally:
        await unlist(redis, job_id, bad)


async def test_what_is_no_record_at_all(redis, job_id):
    store, bad = JobStore(redis), f"{job_id}-list"
    record, _ = await store.create(JobRecord(job_id, RESOLVED, "digest", 1.0, 1.0))
    await command(redis, "RPUSH", job_key(bad, "record"), "x")
    await listed(redis, bad)
    await listed(redis, b"\xff\xfe")
    try:
        assert record in await store.active()
    finally:
        await unlist(redis, job_id, bad, b"\xff\xfe")


async def test_a_record_of_another_job(redis, job_id):
    store, copy = JobStore(redis), f"{job_id}-copy"
    await store.create(JobRecord(job_id, RESOLVED, "digest", 1.0, 1.0))
    raw = await command(redis, "GET", job_key(job_id, "record"))
    await command(redis, "SET", job_key(copy, "record"), raw)
    with pytest.raises(Conflict, match="damaged"):
        await store.get(copy)
    await unlist(redis, job_id)


def test_a_disk_that_is_full_is_waited_for():
    """The server refuses all writes until its file can be written; nothing has failed."""
    error = refusal("MISCONF Errors writing to the AOF file: No space left on device")
    assert isinstance(error, Unavailable) and error.retryable
    assert not isinstance(error, StoreFull)
    assert "see to the disk" in str(error)
    assert isinstance(refusal("BUSY Valkey is busy running a script."), Unavailable)


def refusal(text: str):
    return headway_error(ResponseError(text), "redis://h:1/0")
