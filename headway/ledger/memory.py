"""The work ledger in one process: the readable reference that the scripts must match.

For tests, benchmarks and simulations; it decides by `headway.rl.schedule` itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.errors import Conflict, InvalidSpec, LedgerViolation, NotFound
from headway.ledger.api import (
    ClaimResult,
    Counts,
    Holder,
    Lease,
    LedgerConfig,
    Member,
    TakeResult,
    consecutive_from,
)
from headway.messages import Ticket
from headway.rl import schedule


@dataclass(slots=True)
class _Held:
    """A lease as the ledger keeps it."""

    node_id: str
    token: int
    start_version: int
    since_s: float
    until_s: float


@dataclass(slots=True)
class _State:
    config: LedgerConfig
    tickets: dict[int, Ticket] = field(default_factory=dict)  # issued and leased
    issued: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    leases: dict[int, _Held] = field(default_factory=dict)
    deadlines: dict[int, int] = field(default_factory=dict)  # leased and delivered
    late: set[int] = field(default_factory=set)
    arrived: dict[int, float] = field(default_factory=dict)  # in order of arrival
    payloads: dict[int, bytes] = field(default_factory=dict)
    batches: dict[int, TakeResult] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    count: Counter[str] = field(default_factory=Counter)
    issued_total: int = 0
    next_take: int = 0
    next_commit: int = 0
    trimmed: int = 0
    token: int = 0
    stalled_step: int = -1
    closed: bool = False


class MemoryLedger:
    """One job's ledger in this process. See `api.Ledger`. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opened: _State | None = None
        self._members: dict[str, tuple[float, Member]] = {}

    async def open(self, config: LedgerConfig) -> None:
        """Creates the ledger, or finds it again. See `Ledger.open`."""
        config = config.checked()
        if self._opened is None:
            self._opened = _State(config)
        elif self._opened.config != config:
            raise Conflict(f"the ledger was opened with other settings: {self._opened.config}")

    async def issue(self, tickets: Sequence[Ticket]) -> int:
        """Adds tickets; returns how many were accepted. See `Ledger.issue`."""
        state = self._state()
        if not tickets:
            return 0
        first = consecutive_from(tickets)
        if first > state.issued_total:
            raise LedgerViolation(
                f"ticket {first} leaves a gap: the next id is {state.issued_total}"
            )
        outstanding = len(state.issued) + len(state.leases) + len(state.arrived)
        room = 0 if state.closed else max(0, state.config.max_outstanding_groups - outstanding)
        accepted = min(len(tickets), state.issued_total + room - first)
        for ticket in tickets[state.issued_total - first : accepted]:
            state.tickets[ticket.ticket_id] = ticket
            state.issued.add(ticket.ticket_id)
        state.issued_total = max(state.issued_total, first + accepted)
        return accepted

    async def claim(self, node_id: str, version: int, limit: int = 1) -> ClaimResult:
        """Leases up to `limit` tickets. See `Ledger.claim`."""
        state = self._state()
        config = state.config
        if limit < 1:
            raise InvalidSpec(f"limit is {limit}; it must be at least 1")
        if not 0 <= version <= state.next_take:
            raise LedgerViolation(
                f"node {node_id} claims at version {version}, which no step has made:"
                f" the next step is {state.next_take}"
            )
        if state.closed:
            return ClaimResult((), "closed")
        now = self._expire()
        if version + config.max_policy_lag < state.next_take:
            return ClaimResult((), "stale_version")
        if not state.issued:
            return ClaimResult((), "empty")
        if self._delivered_bytes() >= config.max_outstanding_bytes:
            limit = min(limit, config.batch_groups - len(state.leases) - len(state.arrived))
            if limit <= 0:
                return ClaimResult((), "bytes")
        room = schedule.room(
            state.deadlines, state.next_take, version, config.max_policy_lag, config.batch_groups
        )
        limit = min(limit, room)
        if limit <= 0:
            return ClaimResult((), "lag")
        return ClaimResult(
            tuple(self._lease(i, node_id, version, now) for i in sorted(state.issued)[:limit])
        )

    def _lease(self, ticket_id: int, node_id: str, version: int, now: float) -> Lease:
        state = self._state()
        state.token += 1
        state.issued.remove(ticket_id)
        state.attempts[ticket_id] = state.attempts.get(ticket_id, 0) + 1
        state.leases[ticket_id] = _Held(
            node_id, state.token, version, now, now + state.config.lease_s
        )
        state.deadlines[ticket_id] = version + state.config.max_policy_lag
        return Lease(state.tickets[ticket_id], state.token, state.attempts[ticket_id], version)

    async def renew(self, node_id: str, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Extends leases; returns those still held. See `Ledger.renew`."""
        state = self._state()
        now = self._expire()
        kept = tuple(lease for lease in leases if self._held(lease))
        for lease in kept:
            state.leases[lease.ticket.ticket_id].until_s = now + state.config.lease_s
        return kept

    async def release(self, lease: Lease) -> bool:
        """Hands a ticket back. See `Ledger.release`."""
        state = self._state()
        self._expire()
        if not self._held(lease):
            return False
        ticket_id = lease.ticket.ticket_id
        state.attempts[ticket_id] -= 1
        self._make_claimable(ticket_id)
        return True

    async def deliver(self, lease: Lease, payload: bytes, filter_reason: str = "") -> bool:
        """Stores a group once. See `Ledger.deliver`."""
        state = self._state()
        now = self._expire()
        if state.closed or not self._held(lease):
            state.count["refused"] += 1
            return False
        ticket_id = lease.ticket.ticket_id
        if filter_reason:
            self._end(ticket_id, "filtered", filter_reason)
            return True
        del state.leases[ticket_id], state.tickets[ticket_id], state.attempts[ticket_id]
        state.arrived[ticket_id] = now
        state.payloads[ticket_id] = bytes(payload)
        return True

    async def fail(self, lease: Lease, reason: str) -> bool:
        """Ends an attempt that cannot succeed. See `Ledger.fail`."""
        state = self._state()
        self._expire()
        if not self._held(lease):
            return False
        state.count["failed"] += 1
        self._retry_or_abandon(lease.ticket.ticket_id, reason)
        return True

    async def take(self, step: int) -> TakeResult:
        """The batch of `step`, or what it waits for. See `Ledger.take`."""
        state = self._state()
        if step < state.next_take:
            if step not in state.batches:
                raise NotFound(f"step {step} was trimmed: a later checkpoint covers it")
            return state.batches[step]
        if step > state.next_take:
            raise LedgerViolation(
                f"step {step} is out of order: the next step to take is {state.next_take}"
            )
        now = self._expire()
        batch_groups = state.config.batch_groups
        arrived = list(state.arrived)
        if state.config.on_late != "wait":
            for ticket_id in schedule.give_up(step, state.deadlines, arrived, batch_groups):
                self._give_up(ticket_id)
        filled = schedule.fill(step, state.deadlines, arrived, batch_groups)
        if filled.ticket_ids is None:
            if len(arrived) >= batch_groups and state.stalled_step != step:
                state.stalled_step = step
                state.count["stalled"] += 1
            waiting = tuple(self._holder(i, now) for i in filled.waiting_for)
            return TakeResult(None, len(arrived), waiting)
        return self._take(step, filled.ticket_ids, now)

    def _take(self, step: int, ticket_ids: tuple[int, ...], now: float) -> TakeResult:
        state = self._state()
        late = frozenset(state.late.intersection(ticket_ids))
        queue_s = {ticket_id: now - state.arrived.pop(ticket_id) for ticket_id in ticket_ids}
        for ticket_id in ticket_ids:
            self._forget_deadline(ticket_id)
        size = len(ticket_ids)
        state.batches[step] = TakeResult(
            ticket_ids, size, late=late, replayed=True, queue_s=queue_s
        )
        state.next_take += 1
        state.count["taken"] += size
        return TakeResult(ticket_ids, size, late=late, queue_s=queue_s)

    def _give_up(self, ticket_id: int) -> None:
        state = self._state()
        if state.config.on_late == "drop":
            self._end(ticket_id, "dropped", "late")
        else:
            del state.deadlines[ticket_id]
            state.late.add(ticket_id)
            state.count["late"] += 1

    def _holder(self, ticket_id: int, now: float) -> Holder:
        held = self._state().leases[ticket_id]
        return Holder(ticket_id, held.node_id, held.start_version, now - held.since_s)

    async def payloads(self, ticket_ids: Sequence[int]) -> list[bytes]:
        """Payloads in the order of the ids. See `Ledger.payloads`."""
        state = self._state()
        for ticket_id in ticket_ids:
            if ticket_id not in state.payloads:
                raise NotFound(f"no payload of ticket {ticket_id}: never delivered, or trimmed")
        return [state.payloads[ticket_id] for ticket_id in ticket_ids]

    async def commit(self, step: int, ticket_ids: Sequence[int]) -> None:
        """Step `step` trained on these groups. See `Ledger.commit`."""
        state = self._state()
        if step < state.trimmed:
            return
        if step not in state.batches:
            raise LedgerViolation(f"step {step} cannot be committed: it was never taken")
        taken = state.batches[step].ticket_ids or ()
        if tuple(ticket_ids) != taken:
            raise LedgerViolation(f"step {step} took the tickets {taken}, not {ticket_ids}")
        if step > state.next_commit:
            raise LedgerViolation(
                f"step {step} is out of order: the next to commit is {state.next_commit}"
            )
        if step == state.next_commit:
            state.next_commit += 1
            state.count["taken"] -= len(taken)
            state.count["consumed"] += len(taken)

    async def trim(self, step: int) -> int:
        """Frees the payloads of all steps before `step`. See `Ledger.trim`."""
        state = self._state()
        if step > state.next_commit:
            raise LedgerViolation(
                f"cannot trim to step {step}: the next to commit is {state.next_commit}"
            )
        freed = 0
        for done in range(state.trimmed, step):
            for ticket_id in state.batches.pop(done).ticket_ids or ():
                del state.payloads[ticket_id]
                freed += 1
            state.trimmed = done + 1
        return freed

    async def counts(self) -> Counts:
        """A consistent count of all tickets. See `Ledger.counts`."""
        state = self._state()
        self._expire()
        count = state.count
        return Counts(
            issued_total=state.issued_total,
            issued=len(state.issued),
            leased=len(state.leases),
            delivered=len(state.arrived),
            taken=count["taken"],
            consumed=count["consumed"],
            filtered=count["filtered"],
            dropped=count["dropped"],
            abandoned=count["abandoned"],
            refused_deliveries=count["refused"],
            expired_leases=count["expired"],
            step=state.next_commit,
            payload_bytes=self._delivered_bytes(),
            reasons=dict(state.reasons),
            held_bytes=sum(map(len, state.payloads.values())),
            late=count["late"],
            stalled_steps=count["stalled"],
            failed_attempts=count["failed"],
        )

    async def announce(self, member: Member, ttl_s: float) -> None:
        """A rollout node serves this job until `ttl_s` from now."""
        self._members[member.node_id] = (self._clock() + ttl_s, member)

    async def withdraw(self, node_id: str) -> None:
        """A rollout node serves this job no longer."""
        self._members.pop(node_id, None)

    async def members(self) -> tuple[Member, ...]:
        """The nodes whose announcement has not run out, by node id."""
        now = self._clock()
        self._members = {k: item for k, item in self._members.items() if item[0] > now}
        return tuple(member for _, (_, member) in sorted(self._members.items()))

    async def close(self) -> None:
        """Ends the job's work. See `Ledger.close`."""
        self._state().closed = True

    def _state(self) -> _State:
        if self._opened is None:
            raise NotFound("this job has no ledger: it was never opened")
        return self._opened

    def _held(self, lease: Lease) -> bool:
        held = self._state().leases.get(lease.ticket.ticket_id)
        return held is not None and held.token == lease.token

    def _delivered_bytes(self) -> int:
        state = self._state()
        return sum(len(state.payloads[ticket_id]) for ticket_id in state.arrived)

    def _expire(self) -> float:
        """Ends the leases whose time is up; returns the time."""
        now = self._clock()
        state = self._state()
        for ticket_id, held in list(state.leases.items()):
            if held.until_s <= now:
                state.count["expired"] += 1
                self._retry_or_abandon(ticket_id, "lease_expired")
        return now

    def _retry_or_abandon(self, ticket_id: int, reason: str) -> None:
        state = self._state()
        if state.attempts[ticket_id] >= state.config.max_attempts:
            self._end(ticket_id, "abandoned", reason)
        else:
            self._make_claimable(ticket_id)

    def _make_claimable(self, ticket_id: int) -> None:
        state = self._state()
        del state.leases[ticket_id]
        self._forget_deadline(ticket_id)
        state.issued.add(ticket_id)

    def _end(self, ticket_id: int, kind: str, reason: str) -> None:
        state = self._state()
        del state.leases[ticket_id], state.tickets[ticket_id], state.attempts[ticket_id]
        self._forget_deadline(ticket_id)
        state.count[kind] += 1
        state.reasons[reason] += 1

    def _forget_deadline(self, ticket_id: int) -> None:
        state = self._state()
        state.deadlines.pop(ticket_id, None)
        state.late.discard(ticket_id)
