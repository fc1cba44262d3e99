"""A job's journal: its events and metrics rows, as two Redis streams.

`hw:{<job>}:events` and `hw:{<job>}:metrics` are streams whose entries have one
field, `json`. Written by the learner's rank 0 (events, metrics), the coordinator and the
rollout nodes (events), read by the coordinator for its REST pages and SSE. Never trimmed
while the job is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from redis.asyncio import Redis

from headway.errors import InvalidSpec
from headway.finite import finite
from headway.ledger.keys import job_key
from headway.redis_client import command

START: Final = "0-0"
"""The `after` that reads from the beginning."""

ENTRY_ID: Final = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?")
"""The form of an entry's id; both parts are below 2^63, as Redis wants them."""

Row = dict[str, Any]


class Journal:
    """Appends and reads one job's events and metrics. Safe to share between tasks.

    Unavailable leaves it open whether an entry was appended; repeating may append it twice.
    """

    def __init__(self, redis: Redis, job_id: str) -> None:
        self._redis: Any = redis
        self._events = job_key(job_id, "events")
        self._metrics = job_key(job_id, "metrics")

    async def append_event(self, kind: str, message: str, **fields: Any) -> str:
        """Adds an event and returns its id. `time` is added on reading, from the store's clock."""
        return await self._append(self._events, {**fields, "kind": kind, "message": message})

    async def append_metrics(self, step: int, row: Mapping[str, Any]) -> str:
        """Adds one step's metrics and returns the row's id.

        A resumed job appends the steps it retraces once more: for a step that
        occurs twice, the later row counts.
        """
        return await self._append(self._metrics, {**row, "step": step})

    async def read_events(self, after: str = START, limit: int = 100) -> list[Row]:
        """Up to `limit` events later than the id `after`, oldest first.

        Each has `id`, `time` (Unix seconds, the store's clock), `kind`, `message`
        and what was given. InvalidSpec for a malformed id.
        """
        return await self._read(self._events, after, limit)

    async def last_events(self, limit: int) -> list[Row]:
        """The `limit` newest events, oldest first."""
        entries = await command(self._redis, "XREVRANGE", self._events, "+", "-", "COUNT", limit)
        return [_row(entry) for entry in reversed(entries)]

    async def read_metrics(self, after: str = START, limit: int = 100) -> list[Row]:
        """Up to `limit` metrics rows later than the id `after`, oldest first."""
        return await self._read(self._metrics, after, limit)

    async def _append(self, stream: str, row: Mapping[str, Any]) -> str:
        body = json.dumps(finite(row), separators=(",", ":"), allow_nan=False)
        return str((await command(self._redis, "XADD", stream, "*", "json", body)).decode())

    async def _read(self, stream: str, after: str, limit: int) -> list[Row]:
        _check(after, limit)
        entries = await command(self._redis, "XRANGE", stream, f"({after}", "+", "COUNT", limit)
        return [_row(entry) for entry in entries]


def _check(after: str, limit: int) -> None:
    if not ENTRY_ID.fullmatch(after):
        raise InvalidSpec(f"after={after!r} is not the id of a journal entry")
    if limit < 1:
        raise InvalidSpec(f"limit={limit} is not a positive number")


def _row(entry: Any) -> Row:
    entry_id = entry[0].decode()
    row: Row = {"id": entry_id, "time": int(entry_id.partition("-")[0]) / 1000}
    row.update(json.loads(entry[1][b"json"]))  # the client turns stream entries into dicts
    return row
