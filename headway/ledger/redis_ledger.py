"""The work ledger in Redis or Valkey: every method is one atomic script.

State and rules live in the scripts beside this file and in `keys`; this file only
packs arguments and unpacks answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from headway.errors import InvalidSpec, NotFound
from headway.ledger.api import (
    ClaimResult,
    Counts,
    Holder,
    Lease,
    LeaseView,
    LedgerConfig,
    LedgerView,
    Member,
    TakeResult,
    consecutive_from,
)
from headway.ledger.keys import RETENTION_S, job_key, ledger_keys, room_key
from headway.ledger.scripts import TRANSITIONS, script
from headway.messages import Ticket
from headway.payloads import MAX_GROUP_BYTES, check_sizes, pack_ticket, unpack_ticket
from headway.redis_client import address, command, headway_error

_FIRST_PAYLOADS = 4
_REPLY_BYTES = 4 << 20  # payloads are read in replies of about this size


class RedisLedger:
    """One of a job's ledgers on a server that all its processes reach. See `api.Ledger`.

    `redis` is a `redis.asyncio` client that answers in bytes (`redis_client.connect`).
    Unavailable leaves it open whether the transition was made, and every call may be
    repeated: tokens and step numbers fence them. A claim whose answer was lost
    leaves a lease that nobody knows of and that runs out; a delivery made before its
    answer was lost is, when repeated, refused and counted.
    """

    def __init__(self, redis: Any, job_id: str, room: str = "") -> None:
        self._redis = redis
        self._keys = ledger_keys(job_id, room)
        self._payloads_key = job_key(job_id, room_key(room, "payloads"))
        self._scripts = {name: redis.register_script(script(name)) for name in TRANSITIONS}

    async def open(self, config: LedgerConfig) -> None:
        """Creates the ledger, or finds it again. See `Ledger.open`."""
        config = config.checked()
        settings = {
            "batch_groups": config.batch_groups,
            "max_policy_lag": config.max_policy_lag,
            "on_late": config.on_late,
            "lease_us": round(config.lease_s * 1e6),
            "max_attempts": config.max_attempts,
            "max_outstanding_groups": config.max_outstanding_groups,
            "max_outstanding_bytes": config.max_outstanding_bytes,
        }
        fields = [part for item in settings.items() for part in item]
        text = json.dumps(dataclasses.asdict(config), sort_keys=True)
        await self._run("open", text, *fields)

    async def issue(self, tickets: Sequence[Ticket]) -> int:
        """Adds tickets; returns how many were accepted. See `Ledger.issue`."""
        if not tickets:
            return 0
        first = consecutive_from(tickets)
        return int(await self._run("issue", first, *map(pack_ticket, tickets)))

    async def claim(self, node_id: str, version: int, limit: int = 1) -> ClaimResult:
        """Leases up to `limit` tickets. See `Ledger.claim`."""
        if limit < 1:
            raise InvalidSpec(f"limit is {limit}; it must be at least 1")
        refusal, *granted = await self._run("claim", node_id, version, limit)
        if refusal:
            return ClaimResult((), refusal.decode())
        return ClaimResult(
            tuple(
                Lease(unpack_ticket(body), token, attempt, version)
                for _, token, attempt, body in granted
            )
        )

    async def renew(self, node_id: str, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Extends leases; returns those still held. See `Ledger.renew`."""
        pairs = [part for lease in leases for part in (lease.ticket.ticket_id, lease.token)]
        return tuple(leases[position] for position in await self._run("renew", *pairs))

    async def release(self, lease: Lease) -> bool:
        """Hands a ticket back. See `Ledger.release`."""
        return bool(await self._run("release", lease.ticket.ticket_id, lease.token))

    async def deliver(self, lease: Lease, payload: bytes, filter_reason: str = "") -> bool:
        """Stores a group once. See `Ledger.deliver`."""
        kept = b"" if filter_reason else payload
        check_sizes((kept,), MAX_GROUP_BYTES, "a group")
        ticket_id = lease.ticket.ticket_id
        return bool(await self._run("deliver", ticket_id, lease.token, filter_reason, kept))

    async def fail(self, lease: Lease, reason: str) -> bool:
        """Ends an attempt that cannot succeed. See `Ledger.fail`."""
        return bool(await self._run("fail", lease.ticket.ticket_id, lease.token, reason))

    async def take(self, step: int) -> TakeResult:
        """The batch of `step`, or what it waits for. See `Ledger.take`."""
        kind, *rest = await self._run("take", step)
        if kind == 0:
            num_ready, *waiting = rest
            holders = (
                Holder(ticket_id, node.decode(), start, held_us / 1e6)
                for ticket_id, start, held_us, node in waiting
            )
            return TakeResult(None, num_ready, tuple(holders))
        ids, late, queued = map(_numbers, rest[0].split(b";"))
        return TakeResult(
            ticket_ids=ids,
            num_ready=len(ids),
            late=frozenset(late),
            replayed=kind == 2,
            queue_s={id_: us / 1e6 for id_, us in zip(ids, queued, strict=True)},
        )

    async def payloads(self, ticket_ids: Sequence[int]) -> list[bytes]:
        """Payloads in the order of the ids. See `Ledger.payloads`."""
        found: list[bytes] = []
        size, num = 0, _FIRST_PAYLOADS
        while ids := ticket_ids[len(found) : len(found) + num]:
            # One reply of a whole batch may be gigabytes: it would hold up the server for all.
            for ticket_id, payload in zip(
                ids, await command(self._redis, "HMGET", self._payloads_key, *ids), strict=True
            ):
                if payload is None:
                    raise NotFound(f"no payload of ticket {ticket_id}: never delivered, or trimmed")
                found.append(payload)
                size += len(payload)
            num = max(1, _REPLY_BYTES * len(found) // max(1, size))
        return found

    async def commit(self, step: int, ticket_ids: Sequence[int]) -> None:
        """Step `step` trained on these groups. See `Ledger.commit`."""
        await self._run("commit", step, ",".join(map(str, ticket_ids)))

    async def trim(self, step: int) -> int:
        """Frees the payloads of all steps before `step`. See `Ledger.trim`."""
        return int(await self._run("trim", step))

    async def counts(self) -> Counts:
        """A consistent count of all tickets. See `Ledger.counts`."""
        pairs, issued, leased, delivered, reasons = await self._run("counts")
        meta = _mapping(pairs)

        def number(field: str) -> int:
            return int(meta.get(field, 0))

        return Counts(
            issued_total=number("issued_total"),
            issued=issued,
            leased=leased,
            delivered=delivered,
            taken=number("taken"),
            consumed=number("consumed"),
            filtered=number("filtered"),
            dropped=number("dropped"),
            abandoned=number("abandoned"),
            refused_deliveries=number("refused"),
            expired_leases=number("expired"),
            step=number("next_commit"),
            payload_bytes=number("bytes"),
            reasons={reason: int(count) for reason, count in _mapping(reasons).items()},
            held_bytes=number("held_bytes"),
            late=number("late"),
            stalled_steps=number("stalled"),
            failed_attempts=number("failed"),
        )

    async def look(self) -> LedgerView:
        """Who holds what. See `Ledger.look`."""
        pairs, issued, leases, deadlines, arrived = await self._run("look")
        meta = _mapping(pairs)
        views = (
            LeaseView(ticket_id, node.decode(), start, attempt, held_us / 1e6, left_us / 1e6)
            for ticket_id, start, held_us, left_us, node, attempt in leases
        )
        return LedgerView(
            step=int(meta.get("next_take", 0)),
            batch_groups=int(meta["batch_groups"]),
            max_policy_lag=int(meta["max_policy_lag"]),
            closed="closed" in meta,
            issued=issued,
            leases=tuple(sorted(views, key=lambda view: view.ticket_id)),
            deadlines={int(key): int(value) for key, value in _mapping(deadlines).items()},
            arrived=tuple(map(int, arrived)),
        )

    async def announce(self, member: Member, ttl_s: float) -> None:
        """A rollout node serves this job until `ttl_s` from now."""
        body = json.dumps(dataclasses.asdict(member))
        await self._run("announce", member.node_id, body, round(ttl_s * 1e6))

    async def withdraw(self, node_id: str) -> None:
        """A rollout node serves this job no longer."""
        await self._run("withdraw", node_id)

    async def members(self) -> tuple[Member, ...]:
        """The nodes whose announcement has not run out, by node id."""
        found = [_member(body) for body in await self._run("members")]
        return tuple(sorted(found, key=lambda member: member.node_id))

    async def close(self) -> None:
        """Ends the job's work. See `Ledger.close`."""
        await self._run("close", RETENTION_S)

    async def _run(self, transition: str, *args: str | bytes | int) -> Any:
        try:
            return await self._scripts[transition](keys=self._keys, args=args)
        except RedisError as error:
            raise headway_error(error, address(self._redis)) from error


def _member(body: bytes) -> Member:
    fields = json.loads(body)
    return Member(**{**fields, "backends": tuple(fields["backends"])})


def _numbers(text: bytes) -> tuple[int, ...]:
    return tuple(map(int, text.split(b","))) if text else ()


def _mapping(flat: Sequence[bytes]) -> dict[str, str]:
    return {flat[i].decode(): flat[i + 1].decode(errors="replace") for i in range(0, len(flat), 2)}
