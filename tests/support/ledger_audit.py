"""Everything a ledger holds at one moment, and the invariants that it must keep.

The audit knows nothing of how a ledger decides. It looks at the raw state after every
call and remembers what it saw: where each ticket was, what it was delivered with, which
step took it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.ledger.api import Counts, LedgerConfig
from headway.rl.schedule import feasible

Batch = tuple[tuple[int, ...], frozenset[int]]  # ids, those that are late

_ORDER = ("issued", "leased", "delivered", "taken", "consumed")
_MAY_FOLLOW = {
    "issued": {"issued", "leased", "delivered", "ended"},
    "leased": {"issued", "leased", "delivered", "ended"},
    "delivered": {"delivered", "taken"},
    "taken": {"taken", "consumed"},
    "consumed": {"consumed"},
    "ended": {"ended"},
}
"""Within one call: a lease may run out and be granted again, nothing else is two moves."""


@dataclass(frozen=True)
class Snapshot:
    """A ledger's raw state; sets and mappings by ticket id."""

    issued: frozenset[int]
    leased: Mapping[int, int]  # -> start version
    delivered: tuple[int, ...]  # in order of arrival
    batches: Mapping[int, Batch]  # by step, those not trimmed
    deadlines: Mapping[int, int]
    late: frozenset[int]
    bodies: frozenset[int]
    attempts: Mapping[int, int]
    payloads: Mapping[int, bytes]
    issued_total: int
    next_take: int
    next_commit: int
    trimmed: int


class Audit:
    """One ledger's history, checked as it grows."""

    def __init__(self, config: LedgerConfig) -> None:
        self.config = config
        self.batches: list[Batch] = []  # all ever taken
        self._states: dict[int, str] = {}
        self._start: dict[int, int] = {}  # version of the last claim
        self._payloads: dict[int, bytes] = {}

    @property
    def ever_started(self) -> Mapping[int, int]:
        """The version of each ticket's last claim."""
        return self._start

    def check(self, now: Snapshot, counts: Counts) -> None:
        """Every invariant of the ledger, after one call."""
        self._take_notice(now)
        states = self._states_of(now)
        self._conserved(now, counts, states)
        self._moved(states)
        self._bounded(now, counts)
        self._fair(now)
        self._whole(now, counts, states)
        self._states = states

    def _take_notice(self, now: Snapshot) -> None:
        self._start.update(now.leased)
        for step, batch in sorted(now.batches.items()):
            if step < len(self.batches):
                assert self.batches[step] == batch, f"step {step} took other groups before"
            else:
                assert step == len(self.batches), f"step {step} was taken out of order"
                self._taken(step, batch)
        assert now.next_take == len(self.batches)
        assert 0 <= now.trimmed <= now.next_commit <= now.next_take
        assert set(now.batches) == set(range(now.trimmed, now.next_take))

    def _taken(self, step: int, batch: Batch) -> None:
        ids, late = batch
        config = self.config
        assert len(ids) == config.batch_groups and list(ids) == sorted(set(ids))
        before = {ticket for taken, _ in self.batches for ticket in taken}
        assert not before & set(ids), "a group is in two steps"
        assert late <= set(ids) and (not late or config.on_late == "mask")
        for ticket in set(ids) - late:
            lag = step - self._start[ticket]
            assert 0 <= lag <= config.max_policy_lag, f"ticket {ticket} lags {lag} at step {step}"
        self.batches.append(batch)

    def _states_of(self, now: Snapshot) -> dict[int, str]:
        """Each ticket's one state. AssertionError when it has two."""
        states: dict[int, str] = {}
        taken = [ids for ids, _ in self.batches]
        places = {
            "issued": now.issued,
            "leased": now.leased,
            "delivered": now.delivered,
            "taken": [i for ids in taken[now.next_commit :] for i in ids],
            "consumed": [i for ids in taken[: now.next_commit] for i in ids],
        }
        for name, tickets in places.items():
            for ticket in tickets:
                assert ticket not in states, f"ticket {ticket} is {states[ticket]} and {name}"
                assert 0 <= ticket < now.issued_total, f"ticket {ticket} was never issued"
                states[ticket] = name
        return {ticket: states.get(ticket, "ended") for ticket in range(now.issued_total)}

    def _conserved(self, now: Snapshot, counts: Counts, states: Mapping[int, str]) -> None:
        assert counts.conserved
        for name in _ORDER:
            assert getattr(counts, name) == sum(state == name for state in states.values()), name
        ended = sum(state == "ended" for state in states.values())
        assert counts.filtered + counts.dropped + counts.abandoned == ended, "a ticket is lost"
        assert sum(counts.reasons.values()) == ended
        assert counts.issued_total == now.issued_total
        assert counts.step == now.next_commit

    def _moved(self, states: Mapping[int, str]) -> None:
        assert states.keys() >= self._states.keys()
        for ticket, state in states.items():
            before = self._states.get(ticket, "issued")
            assert state in _MAY_FOLLOW[before], f"ticket {ticket} went from {before} to {state}"

    def _bounded(self, now: Snapshot, counts: Counts) -> None:
        outstanding = len(now.issued) + len(now.leased) + len(now.delivered)
        assert outstanding <= self.config.max_outstanding_groups
        assert counts.payload_bytes == sum(len(now.payloads[i]) for i in now.delivered)
        assert counts.held_bytes == sum(map(len, now.payloads.values()))
        assert all(1 <= n <= self.config.max_attempts for i, n in now.attempts.items()
                   if i in now.leased)  # fmt: skip
        assert all(0 <= n < self.config.max_attempts for i, n in now.attempts.items()
                   if i in now.issued)  # fmt: skip

    def _fair(self, now: Snapshot) -> None:
        started = {*now.leased, *now.delivered}
        assert not now.deadlines.keys() & now.late
        assert now.deadlines.keys() | now.late == started
        assert not now.late or self.config.on_late == "mask"
        for ticket, deadline in now.deadlines.items():
            assert deadline == self._start[ticket] + self.config.max_policy_lag
        assert feasible(now.deadlines, now.next_take, self.config.batch_groups), "(F) is broken"

    def _whole(self, now: Snapshot, counts: Counts, states: Mapping[int, str]) -> None:
        kept = {i for ids, _ in now.batches.values() for i in ids}
        assert now.payloads.keys() == {*now.delivered, *kept}
        for ticket, payload in now.payloads.items():
            assert self._payloads.setdefault(ticket, payload) == payload, "a group was replaced"
        assert now.bodies == {i for i, state in states.items() if state in ("issued", "leased")}
        assert now.attempts.keys() <= now.bodies
