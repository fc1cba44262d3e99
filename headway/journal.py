"""A job's journal: its events and metrics rows, as two Redis streams.

`hw:{<job>}:events` and `hw:{<job>}:metrics` are streams whose entries have one
field, `json`. Written by the learner's rank 0 and the coordinator, read by the
coordinator for its REST pages and SSE. Never trimmed while the job is kept.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from redis.asyncio import Redis

from headway.errors import InvalidSpec
from headway.ledger.keys import job_key
from headway.redis_client import command

START: Final = "0-0"
"""The `after` that reads from the beginning."""

MAX_BLOCK_S: Final = 4.0
"""Longest blocking read; shorter than the client's socket timeout."""

_ID = re.compile(r"\d{1,20}(-\d{1,20})?")

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

    async def read_metrics(self, after: str = START, limit: int = 100) -> list[Row]:
        """Up to `limit` metrics rows later than the id `after`, oldest first."""
        return await self._read(self._metrics, after, limit)

    async def tail_events(
        self, after: str = START, timeout_s: float = 15.0, limit: int = 100
    ) -> list[Row]:
        """As `read_events`, but waits up to `timeout_s` for the first; then empty."""
        return await self._tail(self._events, after, timeout_s, limit)

    async def tail_metrics(
        self, after: str = START, timeout_s: float = 15.0, limit: int = 100
    ) -> list[Row]:
        """As `read_metrics`, but waits up to `timeout_s` for the first; then empty."""
        return await self._tail(self._metrics, after, timeout_s, limit)

    async def _append(self, stream: str, row: Mapping[str, Any]) -> str:
        body = json.dumps(finite(row), separators=(",", ":"), allow_nan=False)
        return str((await command(self._redis, "XADD", stream, "*", "json", body)).decode())

    async def _read(self, stream: str, after: str, limit: int) -> list[Row]:
        _check(after, limit)
        entries = await command(self._redis, "XRANGE", stream, f"({after}", "+", "COUNT", limit)
        return [_row(entry) for entry in entries]

    async def _tail(self, stream: str, after: str, timeout_s: float, limit: int) -> list[Row]:
        _check(after, limit)
        clock = asyncio.get_running_loop().time
        end = clock() + timeout_s
        while True:
            # BLOCK 0 would wait for ever.
            block_ms = max(1, round(1000 * min(MAX_BLOCK_S, end - clock())))
            answer = await command(
                self._redis, "XREAD", "COUNT", limit, "BLOCK", block_ms, "STREAMS", stream, after
            )
            if answer:
                return [_row(entry) for entry in answer[0][1]]
            if clock() >= end:
                return []


def finite(value: Any) -> Any:
    """The value with every NaN and infinity replaced by None: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(item) for item in value]
    return value


def _check(after: str, limit: int) -> None:
    if not _ID.fullmatch(after):
        raise InvalidSpec(f"after={after!r} is not the id of a journal entry")
    if limit < 1:
        raise InvalidSpec(f"limit={limit} is not a positive number")


def _row(entry: Any) -> Row:
    entry_id = entry[0].decode()
    row: Row = {"id": entry_id, "time": int(entry_id.partition("-")[0]) / 1000}
    row.update(json.loads(entry[1][b"json"]))  # the client turns stream entries into dicts
    return row
