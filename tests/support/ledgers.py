"""Every implementation of the ledger behind one handle, for the contract suites."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from redis.asyncio import Redis

from headway.errors import Unavailable
from headway.ledger.api import ClaimResult, Lease, Ledger, LedgerConfig
from headway.ledger.keys import KEYS, job_key
from headway.ledger.memory import MemoryLedger
from headway.ledger.redis_ledger import RedisLedger
from headway.messages import Completion, Group, Ticket, VersionSpan
from headway.payloads import pack_group
from tests.support.ledger_audit import Batch, Snapshot

T = TypeVar("T")
ON_POLICY = LedgerConfig(batch_groups=2, max_policy_lag=0)
LAG_ONE = LedgerConfig(batch_groups=2, max_policy_lag=1)


class Stand(Protocol):
    """A ledger under test, and what a test may do behind its back."""

    ledger: Ledger

    async def run_out(self, node: str | None = None) -> None:
        """Leases and announcements held now, all or a node's, are over: their time has passed."""

    def another_process(self) -> Ledger:
        """The same ledger as a process started later sees it."""

    async def snapshot(self) -> Snapshot:
        """All that the ledger holds."""


class MemoryStand:
    def __init__(self) -> None:
        self.now = 0.0
        self.memory = MemoryLedger(lambda: self.now)
        self.ledger: Ledger = self.memory

    async def run_out(self, node: str | None = None) -> None:
        if node is None:
            self.now += 1e6
        else:
            for held in self.memory._state().leases.values():
                held.until_s = self.now if held.node_id == node else held.until_s

    def another_process(self) -> Ledger:
        return self.memory

    async def snapshot(self) -> Snapshot:
        state = self.memory._state()
        return Snapshot(
            issued=frozenset(state.issued),
            leased={i: held.start_version for i, held in state.leases.items()},
            delivered=tuple(state.arrived),
            batches={s: (b.ticket_ids or (), b.late) for s, b in state.batches.items()},
            deadlines=dict(state.deadlines),
            late=frozenset(state.late),
            bodies=frozenset(state.tickets),
            attempts=dict(state.attempts),
            payloads=dict(state.payloads),
            issued_total=state.issued_total,
            next_take=state.next_take,
            next_commit=state.next_commit,
            trimmed=state.trimmed,
        )


class RedisStand:
    def __init__(self, client: Redis, job_id: str) -> None:
        self.client = client
        self.job_id = job_id
        self.ledger: Ledger = RedisLedger(client, job_id)

    async def run_out(self, node: str | None = None) -> None:
        # The store judges leases by its own clock, which no test can move: so the
        # ends move instead, to the Unix epoch.
        holders = await self.client.hgetall(job_key(self.job_id, "holders"))
        ours = [i for i, text in holders.items() if node in (None, _holder(text)[1])]
        announced = await self.client.zrange(job_key(self.job_id, "members_until"), 0, -1)
        for name, members in (
            ("leases", ours),
            ("members_until", [m for m in announced if node in (None, m.decode())]),
        ):
            if members:
                await self.client.zadd(job_key(self.job_id, name), dict.fromkeys(members, 0))

    def another_process(self) -> Ledger:
        return RedisLedger(self.client, self.job_id)

    async def snapshot(self) -> Snapshot:
        async with self.client.pipeline() as pipe:
            for key in KEYS:
                name = job_key(self.job_id, key.name)
                if key.type == "hash":
                    pipe.hgetall(name)
                elif key.type == "zset":
                    pipe.zrange(name, 0, -1)
                else:
                    pipe.smembers(name)
            raw = dict(zip((key.name for key in KEYS), await pipe.execute(), strict=True))
        assert {*raw["leases"]} == raw["holders"].keys()
        assert {*raw["arrived"]} == raw["arrived_at"].keys()
        meta = raw["meta"]
        return Snapshot(
            issued=frozenset(map(int, raw["issued"])),
            leased={int(i): _holder(text)[0] for i, text in raw["holders"].items()},
            delivered=tuple(map(int, raw["arrived"])),
            batches={int(step): _batch(record) for step, record in raw["batches"].items()},
            deadlines=_ints(raw["deadlines"]),
            late=frozenset(map(int, raw["late"])),
            bodies=frozenset(map(int, raw["tickets"])),
            attempts=_ints(raw["attempts"]),
            payloads={int(i): payload for i, payload in raw["payloads"].items()},
            issued_total=int(meta.get(b"issued_total", 0)),
            next_take=int(meta.get(b"next_take", 0)),
            next_commit=int(meta.get(b"next_commit", 0)),
            trimmed=int(meta.get(b"trimmed", 0)),
        )


def _holder(text: bytes) -> tuple[int, str]:
    """Start version and node of a lease."""
    _, start, _, node = text.decode().split(":", 3)
    return int(start), node


def _batch(record: bytes) -> Batch:
    ids, late, _ = (
        tuple(map(int, part.split(b","))) if part else () for part in record.split(b";")
    )
    return ids, frozenset(late)


def _ints(raw: Mapping[bytes, bytes]) -> dict[int, int]:
    return {int(key): int(value) for key, value in raw.items()}


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
