"""The tickets a node holds, and what the node waits for because of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from headway.ledger.api import Lease, Refusal
from headway.waits import Reason, Wait
from services.rollout.tickets import TicketWork

Key = tuple[str, int]  # of a lease: its ledger's source, its token


@dataclass(slots=True, eq=False)
class Held:
    """A ticket this node works on. Times are the loop's."""

    lease: Lease
    work: TicketWork  # what is done with it
    claimed_at: float
    sampled_at: float | None = None  # None: it is being sampled
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> Key:
        """Names it among all that a node holds."""
        return self.work.source.name, self.lease.token

    @property
    def sampling(self) -> bool:
        """Whether it takes a slot."""
        return self.sampled_at is None


@dataclass(slots=True)
class Standing:
    """Whether a node may claim, and since when it may not. Times are the loop's."""

    since: float  # the last of these changes
    version: int | None = None  # None: before the first install and after a failed one
    broken: bool = False  # by an install that failed
    refusal: Refusal | None = None  # of the last claim
    draining: bool = False

    def installed(self, version: int, now: float) -> None:
        """New weights sample."""
        self.version, self.broken, self.refusal, self.since = version, False, None, now

    def broke(self, now: float) -> None:
        """An install failed; the first of several counts."""
        if not self.broken:
            self.version, self.broken, self.refusal, self.since = None, True, None, now

    def answered(self, refusal: Refusal | None, now: float) -> None:
        """A claim was granted, or refused for this reason."""
        if not self.broken and refusal != self.refusal:
            self.refusal, self.since = refusal, now

    def drains(self, now: float) -> None:
        """Nothing is claimed any more."""
        self.draining = True
        if not self.broken:
            self.since = now


_REFUSED: dict[Refusal, tuple[Reason, str]] = {
    "lag": ("schedule", "the schedule is full: it waits for the learner's next step"),
    "bytes": ("schedule", "delivered groups fill their bound of bytes"),
    "stale_version": ("weights", "the learner is too many steps ahead: newer weights are needed"),
    "empty": ("tickets", "no ticket is issued"),
}


def waits_of(held: Iterable[Held], standing: Standing, job_id: str, now: float) -> list[Wait]:
    """What a node waits for: its oldest ticket of either kind, and what stops its claims."""
    kept = list(held)
    found = []
    sampling = min((h for h in kept if h.sampling), key=lambda h: h.claimed_at, default=None)
    if sampling is not None:
        text = f"samples {_tickets(kept, True)}, the oldest is {_name(sampling)}"
        found.append(Wait("sampling", text, now - sampling.claimed_at, job_id))
    scoring = [(h.sampled_at, h) for h in kept if h.sampled_at is not None]
    if scoring:
        since, oldest = min(scoring, key=lambda pair: pair[0])
        text = f"{_tickets(kept, False)} have no scores or are on their way to the ledger, the"
        found.append(Wait("scores", f"{text} oldest is {_name(oldest)}", now - since, job_id))
    stood_s = now - standing.since
    if standing.draining:
        found.append(Wait("drain", f"finishes {len(kept)} tickets and stops", stood_s, job_id))
    elif standing.version is None:
        why = "an install broke: it waits for the next" if standing.broken else "has no weights yet"
        found.append(Wait("weights", why, stood_s, job_id))
    elif standing.refusal in _REFUSED and sampling is None:
        reason, text = _REFUSED[standing.refusal]
        found.append(Wait(reason, f"idle at version {standing.version}: {text}", stood_s, job_id))
    return found


def _tickets(held: list[Held], sampling: bool) -> str:
    return f"{sum(h.sampling is sampling for h in held)} tickets"


def _name(held: Held) -> str:
    lease = held.lease
    return f"ticket {lease.ticket.ticket_id}, started at version {lease.start_version}"


def room(held: Iterable[Held], capacity: int, work: TicketWork, share: int) -> int:
    """Tickets that may be claimed for this work now.

    `capacity` completions are sampled at once, or one ticket's where it has more, and none is
    claimed while twice that wait for their scores, so that fewer than 3 x are ever held.
    `share`: the node's part of what may be under way in the whole job, so that with a small
    lag the first node to come does not leave the others idle.
    """
    kept, size = list(held), work.num_completions
    whole = max(1, capacity // size) * size
    sampling = sum(entry.work.num_completions for entry in kept if entry.sampling)
    waiting = sum(entry.work.num_completions for entry in kept if not entry.sampling)
    if waiting >= 2 * whole:
        return 0
    ours = sum(entry.sampling for entry in kept if entry.work is work)
    return max(0, min((whole - sampling) // size, share - ours))
