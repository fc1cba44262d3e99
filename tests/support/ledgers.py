"""Every implementation of the ledger behind one handle, for the contract suites."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from redis.asyncio import Redis

from headway.codec import pack_group
from headway.errors import Unavailable
from headway.ledger.api import ClaimResult, Lease, Ledger, LedgerConfig
from headway.ledger.keys import job_key
from headway.ledger.memory import MemoryLedger
from headway.ledger.redis_ledger import RedisLedger
from headway.messages import Completion, Group, Ticket, VersionSpan

T = TypeVar("T")
ON_POLICY = LedgerConfig(batch_groups=2, max_policy_lag=0)
LAG_ONE = LedgerConfig(batch_groups=2, max_policy_lag=1)


class Stand(Protocol):
    """A ledger under test, and what a test may do behind its back."""

    ledger: Ledger

    async def run_out(self) -> None:
        """All leases and announcements held now are over, as if their time had passed."""

    def another_process(self) -> Ledger:
        """The same ledger as a process started later sees it."""

    async def deadlines(self) -> dict[int, int]:
        """Deadlines of the started and not yet taken tickets."""


class MemoryStand:
    def __init__(self) -> None:
        self.now = 0.0
        self.memory = MemoryLedger(lambda: self.now)
        self.ledger: Ledger = self.memory

    async def run_out(self) -> None:
        self.now += 1e6

    def another_process(self) -> Ledger:
        return self.memory

    async def deadlines(self) -> dict[int, int]:
        return dict(self.memory._state().deadlines)


class RedisStand:
    def __init__(self, client: Redis, job_id: str) -> None:
        self.client = client
        self.job_id = job_id
        self.ledger: Ledger = RedisLedger(client, job_id)

    async def run_out(self) -> None:
        # The store judges leases by its own clock, which no test can move: so the
        # ends move instead, to the Unix epoch.
        for name in ("leases", "members_until"):
            key = job_key(self.job_id, name)
            members = await self.client.zrange(key, 0, -1)
            if members:
                await self.client.zadd(key, dict.fromkeys(members, 0))

    def another_process(self) -> Ledger:
        return RedisLedger(self.client, self.job_id)

    async def deadlines(self) -> dict[int, int]:
        found = await self.client.hgetall(job_key(self.job_id, "deadlines"))
        return {int(ticket): int(deadline) for ticket, deadline in found.items()}


def ticket(ticket_id: int) -> Ticket:
    return Ticket(
        ticket_id=ticket_id,
        prompt_ids=(1, 2, 3 + ticket_id),
        prompt=[{"role": "user", "content": f"question {ticket_id}: ä?"}],
        item={"answer": str(ticket_id)},
        n=2,
        seed=ticket_id,
    )


def tickets(start: int, stop: int) -> list[Ticket]:
    return [ticket(i) for i in range(start, stop)]


def ids(claimed: ClaimResult | Sequence[Lease]) -> list[int]:
    leases = claimed.leases if isinstance(claimed, ClaimResult) else claimed
    return [lease.ticket.ticket_id for lease in leases]


async def persist(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a call until its server is back."""
    while True:
        try:
            return await call()
        except Unavailable:
            await asyncio.sleep(0.01)


def payload_of(lease: Lease, length: int = 1) -> bytes:
    completion = Completion(
        token_ids=(7,) * length,
        logprobs=(-0.5,) * length,
        finish_reason="stop",
        spans=(VersionSpan(lease.start_version, 0, length),),
        text="x" * length,
        reward=1.0,
    )
    return pack_group(
        Group(lease.ticket, (completion,) * 2, "node", lease.attempt, lease.start_version, 1.0, 0.1)
    )


async def deliver_all(ledger: Ledger, claimed: ClaimResult) -> None:
    for lease in claimed.leases:
        assert await ledger.deliver(lease, payload_of(lease))


async def train(ledger: Ledger, step: int) -> tuple[int, ...]:
    taken = await ledger.take(step)
    assert taken.ticket_ids is not None
    await ledger.commit(step, taken.ticket_ids)
    return taken.ticket_ids
