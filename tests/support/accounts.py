"""Adds a job up after its end: from the run folder's samples and the ledger's own keys."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from headway.ledger.api import Counts
from headway.ledger.keys import job_key
from headway.ledger.redis_ledger import RedisLedger
from headway.report_data import is_validation


@dataclass(frozen=True)
class Accounts:
    """Where every ticket of a job went."""

    counts: Counts
    trained: tuple[int, ...]  # ticket ids in the order of the samples
    open: int  # issued and not trained when the job ended
    largest_lag: int  # of any trained token, from the version spans
    smallest_lag: int
    steps: tuple[int, ...]  # rows of metrics.jsonl

    @property
    def doubled(self) -> int:
        """Tickets trained more than once."""
        return sum(n - 1 for n in Counter(self.trained).values())

    @property
    def lost(self) -> int:
        """Tickets issued that are nowhere."""
        ended = self.counts.filtered + self.counts.dropped + self.counts.abandoned
        return self.counts.issued_total - len(set(self.trained)) - ended - self.open

    def check(self, steps: int, batch: int, lag: int) -> None:
        """Asserts that a job that succeeded balances."""
        assert self.counts.conserved, self.counts
        assert self.steps == tuple(range(1, steps + 1))
        assert len(self.trained) == steps * batch == self.counts.consumed
        assert (self.lost, self.doubled) == (0, 0), self.counts
        assert self.smallest_lag >= 0 and self.largest_lag <= lag


async def accounts(redis: Redis, job_id: str, folder: Path) -> Accounts:
    """Reads a job's accounts. The ledger's open tickets are read by id, not by its counters."""
    counts = await RedisLedger(redis, job_id).counts()
    open_ids: set[bytes] = set()
    for name in ("issued", "leases", "arrived"):
        found = await redis.zrange(job_key(job_id, name), 0, -1)
        assert not open_ids & set(found), f"a ticket is in two states: {open_ids & set(found)}"
        open_ids |= set(found)
    samples = rows(folder / "samples.jsonl")
    lags = [
        sample["step"] - 1 - version
        for sample in samples
        for completion in sample["completions"]
        for version, _, _ in completion["spans"]
    ]
    return Accounts(
        counts=counts,
        trained=tuple(sample["ticket_id"] for sample in samples),
        open=len(open_ids),
        largest_lag=max(lags, default=0),
        smallest_lag=min(lags, default=0),
        steps=tuple(
            row["step"] for row in rows(folder / "metrics.jsonl") if not is_validation(row)
        ),
    )


def rows(path: Path) -> list[dict[str, Any]]:
    """A run folder's JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
