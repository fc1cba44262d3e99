"""The work ledger in one process: the readable reference that the scripts must match.

For tests, benchmarks and simulations; it decides by `headway.rl.schedule` itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headway.errors import Conflict, InvalidSpec, LedgerViolation, NotFound
from headway.ledger.api import (
    ClaimResult,
    Counts,
    Lease,
    LedgerConfig,
    LedgerView,
    Member,
    TakeResult,
    consecutive_from,
)
from headway.ledger.memory_state import State
from headway.messages import Ticket
from headway.payloads import MAX_GROUP_BYTES, check_sizes
from headway.rl import schedule


class MemoryLedger:
    """One job's ledger in this process. See `api.Ledger`. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opened: State | None = None
        self._members: dict[str, tuple[float, Member]] = {}

    async def open(self, config: LedgerConfig) -> None:
        """Creates the ledger, or finds it again. See `Ledger.open`."""
        config = config.checked()
        if self._opened is None:
            self._opened = State(config)
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
        if state.delivered_bytes() >= config.max_outstanding_bytes:
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
            tuple(state.lease(i, node_id, version, now) for i in sorted(state.issued)[:limit])
        )

    async def renew(self, node_id: str, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Extends leases; returns those still held. See `Ledger.renew`."""
        state = self._state()
        now = self._expire()
        kept = tuple(lease for lease in leases if state.holds(lease))
        for lease in kept:
            state.leases[lease.ticket.ticket_id].until_s = now + state.config.lease_s
        return kept

    async def release(self, lease: Lease) -> bool:
        """Hands a ticket back. See `Ledger.release`."""
        state = self._state()
        self._expire()
        if not state.holds(lease):
            return False
        ticket_id = lease.ticket.ticket_id
        state.attempts[ticket_id] -= 1
        state.make_claimable(ticket_id)
        return True

    async def deliver(self, lease: Lease, payload: bytes, filter_reason: str = "") -> bool:
        """Stores a group once. See `Ledger.deliver`."""
        if not filter_reason:
            check_sizes((payload,), MAX_GROUP_BYTES, "a group")
        state = self._state()
        now = self._expire()
        if state.closed or not state.holds(lease):
            state.count["refused"] += 1
            return False
        ticket_id = lease.ticket.ticket_id
        if filter_reason:
            state.end(ticket_id, "filtered", filter_reason)
            return True
        state.deliver(ticket_id, payload, now)
        return True

    async def fail(self, lease: Lease, reason: str) -> bool:
        """Ends an attempt that cannot succeed. See `Ledger.fail`."""
        state = self._state()
        self._expire()
        if not state.holds(lease):
            return False
        state.count["failed"] += 1
        state.retry_or_abandon(lease.ticket.ticket_id, reason)
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
                state.give_up(ticket_id)
        filled = schedule.fill(step, state.deadlines, arrived, batch_groups)
        if filled.ticket_ids is None:
            if len(arrived) >= batch_groups and state.stalled_step != step:
                state.stalled_step = step
                state.count["stalled"] += 1
            waiting = tuple(state.holder(i, now) for i in filled.waiting_for)
            return TakeResult(None, len(arrived), waiting)
        return state.take(step, filled.ticket_ids, now)

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
        return state.counts()

    async def look(self) -> LedgerView:
        """Who holds what. See `Ledger.look`."""
        return self._state().view(self._clock())

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

    def _state(self) -> State:
        if self._opened is None:
            raise NotFound("this job has no ledger: it was never opened")
        return self._opened

    def _expire(self) -> float:
        """Ends the leases whose time is up; returns the time."""
        now = self._clock()
        self._state().expire(now)
        return now
