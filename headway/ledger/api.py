"""The work ledger's interface: what every implementation promises.

    issue -> issued -claim-> leased -deliver-> delivered -take-> taken -commit-> consumed
                ^   expiry/release |               |
                +------------------+               +-> filtered | dropped   (counted)
                attempts used up: abandoned (counted)

Every method is one atomic transition. Version `s` is the policy after `s`
optimiser steps; a ticket started at version `u` has the deadline `u + max_policy_lag`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

from headway.errors import InvalidSpec, LedgerViolation
from headway.messages import Ticket

OnLate = Literal["wait", "mask", "drop"]
Refusal = Literal["empty", "lag", "stale_version", "closed", "bytes"]


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """A job's ledger settings, fixed when it is opened."""

    batch_groups: int  # B: groups a step
    max_policy_lag: int  # eta
    on_late: OnLate = "wait"
    lease_s: float = 30.0
    max_attempts: int = 5
    max_outstanding_groups: int = 0  # issued + leased + delivered; 0: B * (eta + 2)
    max_outstanding_bytes: int = 1 << 30  # delivered payloads held

    def checked(self) -> LedgerConfig:
        """The settings with defaults worked out; InvalidSpec for those that cannot work."""
        smallest = {
            "batch_groups": 1,
            "max_policy_lag": 0,
            "max_attempts": 1,
            "max_outstanding_groups": 0,
            "max_outstanding_bytes": 1,
        }
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise InvalidSpec(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.lease_s > 0:
            raise InvalidSpec(f"lease_s is {self.lease_s}; it must be above 0")
        if self.on_late not in get_args(OnLate):
            raise InvalidSpec(f"on_late is {self.on_late!r}; known: {', '.join(get_args(OnLate))}")
        groups = self.max_outstanding_groups or self.batch_groups * (self.max_policy_lag + 2)
        if groups < self.batch_groups:
            raise InvalidSpec(
                f"max_outstanding_groups {groups} is below batch_groups {self.batch_groups}:"
                " no step could ever be filled"
            )
        return replace(self, max_outstanding_groups=groups)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to deliver one ticket. `token` fences: an older lease cannot deliver."""

    ticket: Ticket
    token: int
    attempt: int
    start_version: int


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """Leases granted, or why there are none."""

    leases: tuple[Lease, ...]
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """Whom a step waits for."""

    ticket_id: int
    node_id: str
    start_version: int
    held_s: float


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease as the ledger sees it; `left_s` is negative when it has run out unnoticed."""

    ticket_id: int
    node_id: str
    start_version: int
    attempt: int
    held_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class LedgerView:
    """Who holds what at one moment, for people who ask why nothing moves."""

    step: int  # the next step to take
    batch_groups: int
    max_policy_lag: int
    closed: bool
    issued: int
    leases: tuple[LeaseView, ...]  # by ticket id
    deadlines: Mapping[int, int]  # of the leased and the delivered
    arrived: tuple[int, ...]  # in order of arrival


@dataclass(frozen=True, slots=True)
class TakeResult:
    """A step's batch in order, or what it waits for.

    `ticket_ids` is None while the batch is incomplete; then `waiting_for` names
    the leased tickets that this step cannot do without (deadline this step, or a
    later one that leaves too few places after it) and `num_ready` the groups that
    have arrived. `late` are taken tickets to be trained with their too old
    tokens masked (on_late: mask). `queue_s` is the time each spent delivered.
    `ticket_ids` ascend, whatever the order of arrival.
    """

    ticket_ids: tuple[int, ...] | None
    num_ready: int = 0
    waiting_for: tuple[Holder, ...] = ()
    late: frozenset[int] = frozenset()
    replayed: bool = False  # the same step was taken before; the same groups again
    queue_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """Where all tickets are. `conserved` holds after every transition."""

    issued_total: int
    issued: int
    leased: int
    delivered: int
    taken: int
    consumed: int
    filtered: int
    dropped: int
    abandoned: int
    refused_deliveries: int  # late or second deliveries, never trained on
    expired_leases: int
    step: int  # the next step to commit
    payload_bytes: int  # of delivered groups, bounded by max_outstanding_bytes
    reasons: Mapping[str, int] = field(default_factory=dict)  # of filtered, dropped, abandoned
    held_bytes: int = 0  # of all groups kept: delivered, and taken but not trimmed
    late: int = 0  # stragglers let go by (on_late: mask), ever
    stalled_steps: int = 0  # steps that stood still for a straggler (on_late: wait), ever
    failed_attempts: int = 0  # by `fail`, ever

    @property
    def conserved(self) -> bool:
        """Every ticket ever issued is in exactly one state."""
        return self.issued_total == (
            self.issued + self.leased + self.delivered + self.taken
            + self.consumed + self.filtered + self.dropped + self.abandoned
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout node that serves a job, as it announced itself."""

    node_id: str
    address: str  # its gRPC address
    transport: Literal["broadcast", "none"]  # none: sim engines hold no tensors
    version: int | None = None
    backends: tuple[str, ...] = ("gloo",)  # of torch.distributed, that it can broadcast over
    session: str = ""  # made up each time a node takes the job up

    @property
    def key(self) -> tuple[str, str, str]:
        """Who it is: a node that came back under its old name and address is another one."""
        return self.node_id, self.address, self.session


class Ledger(Protocol):
    """One job's work ledger. All times are the store's clock.

    Every method that looks at leases first ends those whose time is up. Calls on
    a ledger that was never opened are NotFound.
    """

    async def open(self, config: LedgerConfig) -> None:
        """Creates the ledger, or finds it again; Conflict when the config differs."""

    async def issue(self, tickets: Sequence[Ticket]) -> int:
        """Adds tickets with consecutive ids; returns how many were accepted.

        Ids below `issued_total` were issued before and are skipped (counted as
        accepted); an id that leaves a gap is a LedgerViolation. Fewer are accepted
        when `max_outstanding_groups` is reached.
        """

    async def claim(self, node_id: str, version: int, limit: int = 1) -> ClaimResult:
        """Leases up to `limit` tickets to a node whose installed version is `version`.

        Each grant keeps the lag rule (F) true. Oldest ticket ids first. `bytes` is
        refused only while a batch is started: the bound cannot stop training. A
        version that no taken step can have made is a LedgerViolation.
        """

    async def renew(self, node_id: str, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Extends leases; returns those still held. The others are lost: stop their work."""

    async def release(self, lease: Lease) -> bool:
        """Hands a ticket back (drain); it is claimable at once, the attempt not counted."""

    async def deliver(self, lease: Lease, payload: bytes, filter_reason: str = "") -> bool:
        """Stores a group once. False: the lease is no longer held, or the ledger closed;
        counted, ignored.

        With `filter_reason` the group is filtered on arrival: counted under that
        reason, its payload not kept, its place free for a fresh ticket. InvalidSpec: the
        payload is larger than `payloads.MAX_GROUP_BYTES`.
        """

    async def fail(self, lease: Lease, reason: str) -> bool:
        """Ends an attempt that cannot succeed; the ticket is retried or abandoned."""

    async def take(self, step: int) -> TakeResult:
        """The batch of `step`: exactly B groups, or what it waits for. Safe to repeat.

        A step taken before gives the same again; NotFound when it was trimmed. A
        step that skips one is a LedgerViolation.
        """

    async def payloads(self, ticket_ids: Sequence[int]) -> list[bytes]:
        """Payloads in the order of the ids; NotFound names one that was trimmed."""

    async def commit(self, step: int, ticket_ids: Sequence[int]) -> None:
        """Step `step` trained on these groups; the next step is `step + 1`.

        Repeating a commit is harmless; other ids for a committed step, or a step
        out of order, are a LedgerViolation. For a trimmed step nothing is done.
        """

    async def trim(self, step: int) -> int:
        """A checkpoint after `step` steps is durable: frees payloads of steps < `step`.

        Returns how many groups were freed; LedgerViolation when `step` steps are not
        yet committed.
        """

    async def counts(self) -> Counts:
        """A consistent count of all tickets. Expires leases first."""

    async def look(self) -> LedgerView:
        """Who holds what. Changes nothing: not even leases whose time is up."""

    async def announce(self, member: Member, ttl_s: float) -> None:
        """A rollout node serves this job until `ttl_s` from now."""

    async def withdraw(self, node_id: str) -> None:
        """A rollout node serves this job no longer."""

    async def members(self) -> tuple[Member, ...]:
        """The nodes whose announcement has not run out, by node id."""

    async def close(self) -> None:
        """Ends the job's work: every later claim is refused as `closed`.

        Nothing is issued or delivered any more; what was taken can still be read.
        """


def consecutive_from(tickets: Sequence[Ticket]) -> int:
    """The first id of a non-empty issue; LedgerViolation when the ids leave gaps."""
    first = tickets[0].ticket_id
    for offset, ticket in enumerate(tickets):
        if ticket.ticket_id != first + offset:
            raise LedgerViolation(
                f"ticket {ticket.ticket_id} stands where {first + offset} was expected:"
                " ids must be consecutive"
            )
    return first
