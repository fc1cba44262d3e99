"""The jobs of a fleet in Redis.

Keys (all written by the coordinator only):

    hw:jobs               zset    job id by creation time: every job ever submitted
    hw:jobs:active        zset    the same, of jobs that have not ended: the queue's order
    hw:{<job>}:record     string  JSON of the JobRecord; its one truth
    hw:idempotency:<sha>  string  JSON {job_id, digest}: the job an Idempotency-Key made; 7 days

The zsets are indices: an id is added to them before its record exists and taken out of
the active one after the record has ended, so a coordinator that dies in between loses no
job; readers pass over ids without a record, and over ended ones. A record is made by
SET NX and changed by compare-and-set on its exact bytes, each a single call on a single
key (it works on a Redis cluster), so of several writers none overwrites another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from headway.errors import Conflict, InvalidSpec, NotFound
from headway.jobs import STATES, JobRecord, record_from_dict, record_to_dict
from headway.ledger.keys import job_key
from headway.redis_client import address, command, headway_error
from headway.telemetry import get_logger
from services.coordinator.decisions import Change

log = get_logger(__name__)

ALL_JOBS = "hw:jobs"
ACTIVE_JOBS = "hw:jobs:active"
IDEMPOTENCY_TTL_S = 7 * 24 * 3600

_COMPARE_AND_SET = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class JobStore:
    """Jobs in Redis. Every method raises Unavailable when Redis cannot be used."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self._damaged: set[str] = set()  # jobs whose records were told to be so

    async def create(self, record: JobRecord) -> tuple[JobRecord, bool]:
        """Adds a job unless its id is taken; the job that has the id, and whether it is new."""
        existing = await self.find(record.job_id)
        if existing is not None:
            return existing, False
        for index in (ALL_JOBS, ACTIVE_JOBS):
            await self._run("ZADD", index, "NX", record.created_at, record.job_id)
        if await self._run("SET", _record_key(record.job_id), _encode(record), "NX"):
            return record, True
        return await self.get(record.job_id), False

    async def get(self, job_id: str) -> JobRecord:
        """The job. NotFound when there is none of this id."""
        record = await self.find(job_id)
        if record is None:
            raise NotFound(f"no job {job_id[:80]!r}")
        return record

    async def find(self, job_id: str) -> JobRecord | None:
        """The job, or None."""
        raw = await self._run("GET", _record_key(job_id))
        return None if raw is None else _decode(raw, job_id)

    async def active(self) -> list[JobRecord]:
        """Jobs that have not ended, oldest first."""
        records = await self._get_all(await self._run("ZRANGE", ACTIVE_JOBS, 0, -1))
        for record in records:
            if record.ended:
                await self._run("ZREM", ACTIVE_JOBS, record.job_id)
        return [record for record in records if not record.ended]

    async def page(self, after: str, limit: int) -> tuple[list[JobRecord], str]:
        """Jobs after the job `after` ("": from the start), newest first, and the next `after`."""
        start = 0
        if after:
            rank = await self._run("ZREVRANK", ALL_JOBS, after)
            if rank is None:
                raise InvalidSpec(f"after: there is no job {after[:80]!r}")
            start = rank + 1
        ids = await self._run("ZREVRANGE", ALL_JOBS, start, start + limit - 1)
        return await self._get_all(ids), ids[-1].decode() if len(ids) == limit else ""

    async def update(
        self, job_id: str, decide: Callable[[JobRecord], Change | None]
    ) -> tuple[JobRecord, Change | None]:
        """Changes a job by compare-and-set; `decide` is asked again when another was faster.

        Returns the record as it now is, and the change that was made, if any.
        """
        key = _record_key(job_id)
        while True:
            raw = await self._run("GET", key)
            if raw is None:
                raise NotFound(f"no job {job_id[:80]!r}")
            record = _decode(raw, job_id)
            change = decide(record)
            if change is None:
                return record, None
            if await self._run("EVAL", _COMPARE_AND_SET, 1, key, raw, _encode(change.record)):
                if change.record.ended:
                    await self._run("ZREM", ACTIVE_JOBS, job_id)
                return change.record, change

    async def keyed_job(self, key: str) -> tuple[str, str] | None:
        """Job id and digest that an Idempotency-Key stands for, or None."""
        raw = await self._run("GET", _idempotency_key(key))
        return None if raw is None else _claim(raw)

    async def claim_key(self, key: str, job_id: str, digest: str) -> tuple[str, str]:
        """Binds an Idempotency-Key to a job to be made; the first claim holds for all."""
        mine = json.dumps({"job_id": job_id, "digest": digest})
        await self._run("SET", _idempotency_key(key), mine, "NX", "EX", IDEMPOTENCY_TTL_S)
        return await self.keyed_job(key) or (job_id, digest)

    async def _run(self, *parts: str | bytes | int | float) -> Any:
        return await command(self.redis, *parts)

    async def _get_all(self, job_ids: Sequence[bytes]) -> list[JobRecord]:
        """The records there are; one that is damaged is passed over, and told once."""
        names = [job_id.decode(errors="replace") for job_id in job_ids]
        pipeline = self.redis.pipeline(transaction=False)
        for name in names:
            pipeline.get(_record_key(name))
        try:
            found: list[Any] = await pipeline.execute(raise_on_error=False)
        except RedisError as error:
            raise headway_error(error, address(self.redis)) from error
        records: list[JobRecord] = []
        for name, raw in zip(names, found, strict=True):
            if isinstance(raw, RedisError) and not str(raw).startswith("WRONGTYPE"):
                raise headway_error(raw, address(self.redis)) from raw
            try:
                records += [] if raw is None else [_decode(raw, name)]
            except Conflict as error:
                if name not in self._damaged:
                    log.error("%s", error, extra={"job_id": name})
                self._damaged.add(name)
        return records


def _record_key(job_id: str) -> str:
    return job_key(job_id, "record")


def _idempotency_key(key: str) -> str:
    # Hashed: a caller's key may be any text of any length.
    return f"hw:idempotency:{hashlib.sha256(key.encode()).hexdigest()}"


def _encode(record: JobRecord) -> bytes:
    return json.dumps(record_to_dict(record), separators=(",", ":")).encode()


def _decode(raw: Any, job_id: str) -> JobRecord:
    """The record. Conflict when it is none, whoever wrote it."""
    try:
        record = record_from_dict(json.loads(raw))
        _ = record.total_steps, record.min_nodes, record.max_nodes
        if record.job_id != job_id or record.state not in STATES:
            raise ValueError("another job's, or in no state")
        return record
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Conflict(
            f"the record of job {job_id[:80]!r} in Redis is damaged ({type(error).__name__}):"
            f" bring {_record_key(job_id)[:120]} back, or delete it"
        ) from None


def _claim(raw: Any) -> tuple[str, str]:
    plain = json.loads(raw)
    return str(plain["job_id"]), str(plain["digest"])
