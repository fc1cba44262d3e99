"""What the in-memory ledger keeps of one job, and the moves of a ticket between its states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headway.ledger.api import (
    Counts,
    Holder,
    Lease,
    LeaseView,
    LedgerConfig,
    LedgerView,
    TakeResult,
)
from headway.messages import Ticket


@dataclass(slots=True)
class Held:
    """A lease as the ledger keeps it; times are of the ledger's clock."""

    node_id: str
    token: int
    start_version: int
    since_s: float
    until_s: float


@dataclass(slots=True)
class State:
    """One job's tickets. Nothing here looks at a clock: `now` is handed in."""

    config: LedgerConfig
    tickets: dict[int, Ticket] = field(default_factory=dict)  # issued and leased
    issued: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    leases: dict[int, Held] = field(default_factory=dict)
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

    def lease(self, ticket_id: int, node_id: str, version: int, now: float) -> Lease:
        """issued → leased."""
        self.token += 1
        self.issued.remove(ticket_id)
        self.attempts[ticket_id] = self.attempts.get(ticket_id, 0) + 1
        self.leases[ticket_id] = Held(node_id, self.token, version, now, now + self.config.lease_s)
        self.deadlines[ticket_id] = version + self.config.max_policy_lag
        return Lease(self.tickets[ticket_id], self.token, self.attempts[ticket_id], version)

    def holds(self, lease: Lease) -> bool:
        """Whether this very lease is still good."""
        held = self.leases.get(lease.ticket.ticket_id)
        return held is not None and held.token == lease.token

    def holder(self, ticket_id: int, now: float) -> Holder:
        """Who holds a leased ticket."""
        held = self.leases[ticket_id]
        return Holder(ticket_id, held.node_id, held.start_version, now - held.since_s)

    def deliver(self, ticket_id: int, payload: bytes, now: float) -> None:
        """leased → delivered."""
        del self.leases[ticket_id], self.tickets[ticket_id], self.attempts[ticket_id]
        self.arrived[ticket_id] = now
        self.payloads[ticket_id] = bytes(payload)

    def expire(self, now: float) -> None:
        """Ends the leases whose time is up."""
        for ticket_id, held in list(self.leases.items()):
            if held.until_s <= now:
                self.count["expired"] += 1
                self.retry_or_abandon(ticket_id, "lease_expired")

    def retry_or_abandon(self, ticket_id: int, reason: str) -> None:
        """leased → issued, or → abandoned once the attempts are used up."""
        if self.attempts[ticket_id] >= self.config.max_attempts:
            self.end(ticket_id, "abandoned", reason)
        else:
            self.make_claimable(ticket_id)

    def make_claimable(self, ticket_id: int) -> None:
        """leased → issued."""
        del self.leases[ticket_id]
        self._forget_deadline(ticket_id)
        self.issued.add(ticket_id)

    def end(self, ticket_id: int, kind: str, reason: str) -> None:
        """leased → filtered, dropped or abandoned."""
        del self.leases[ticket_id], self.tickets[ticket_id], self.attempts[ticket_id]
        self._forget_deadline(ticket_id)
        self.count[kind] += 1
        self.reasons[reason] += 1

    def give_up(self, ticket_id: int) -> None:
        """A straggler goes as `on_late` says: dropped, or no longer waited for."""
        if self.config.on_late == "drop":
            self.end(ticket_id, "dropped", "late")
        else:
            del self.deadlines[ticket_id]
            self.late.add(ticket_id)
            self.count["late"] += 1

    def take(self, step: int, ticket_ids: tuple[int, ...], now: float) -> TakeResult:
        """delivered → taken."""
        late = frozenset(self.late.intersection(ticket_ids))
        queue_s = {ticket_id: now - self.arrived.pop(ticket_id) for ticket_id in ticket_ids}
        for ticket_id in ticket_ids:
            self._forget_deadline(ticket_id)
        size = len(ticket_ids)
        self.batches[step] = TakeResult(ticket_ids, size, late=late, replayed=True, queue_s=queue_s)
        self.next_take += 1
        self.count["taken"] += size
        return TakeResult(ticket_ids, size, late=late, queue_s=queue_s)

    def delivered_bytes(self) -> int:
        """Payload bytes that no step has taken."""
        return sum(len(self.payloads[ticket_id]) for ticket_id in self.arrived)

    def counts(self) -> Counts:
        """A consistent count of all tickets."""
        count = self.count
        return Counts(
            issued_total=self.issued_total,
            issued=len(self.issued),
            leased=len(self.leases),
            delivered=len(self.arrived),
            taken=count["taken"],
            consumed=count["consumed"],
            filtered=count["filtered"],
            dropped=count["dropped"],
            abandoned=count["abandoned"],
            refused_deliveries=count["refused"],
            expired_leases=count["expired"],
            step=self.next_commit,
            payload_bytes=self.delivered_bytes(),
            reasons=dict(self.reasons),
            held_bytes=sum(map(len, self.payloads.values())),
            late=count["late"],
            stalled_steps=count["stalled"],
            failed_attempts=count["failed"],
        )

    def view(self, now: float) -> LedgerView:
        """Who holds what."""
        return LedgerView(
            step=self.next_take,
            batch_groups=self.config.batch_groups,
            max_policy_lag=self.config.max_policy_lag,
            closed=self.closed,
            issued=len(self.issued),
            leases=tuple(
                LeaseView(
                    ticket_id,
                    held.node_id,
                    held.start_version,
                    self.attempts[ticket_id],
                    now - held.since_s,
                    held.until_s - now,
                )
                for ticket_id, held in sorted(self.leases.items())
            ),
            deadlines=dict(self.deadlines),
            arrived=tuple(self.arrived),
        )

    def _forget_deadline(self, ticket_id: int) -> None:
        self.deadlines.pop(ticket_id, None)
        self.late.discard(ticket_id)
