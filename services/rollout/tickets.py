"""What is done with one ticket: sampled, judged whole, scored, delivered."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import Counter

from headway.errors import HeadwayError, JobFailed, Unavailable
from headway.jobspec import JobSpec
from headway.ledger.api import ClaimResult, Lease, Ledger
from headway.messages import Completion, Group
from headway.patience import patiently
from headway.payloads import pack_group
from headway.telemetry import get_logger
from services.rollout.engine import Engine
from services.rollout.scoring import Scored, Scores, score_group
from services.rollout.sources import TRAINING, TicketSource

log = get_logger(__name__)
_MAX_FAILURES_IN_A_ROW = 8  # generations; then the engine is to blame, not the tickets
OUTCOMES = Counter("headway_rollout_groups_total", "Tickets by what became of them", ["outcome"])


class EventLog(Protocol):
    """Where events go (`headway.journal.Journal`)."""

    async def append_event(self, kind: str, message: str, **fields: Any) -> str:
        """Adds an event."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled for a ticket."""

    completions: tuple[Completion, ...]  # n
    greedy: Completion | None = None  # what they are compared with, in jobs that ask for it


class TicketWork:
    """One job's tickets on one node. `on_broken` hears of what no ticket can mend."""

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        node_id: str,
        engine: Engine,
        ledger: Ledger,
        scores: Scores,
        events: EventLog,
        on_broken: Callable[[HeadwayError], None],
        source: TicketSource = TRAINING,
    ) -> None:
        self._job_id = job_id
        self._spec = spec
        self._node_id = node_id
        self._engine = engine
        self._ledger = ledger
        self._scores = scores
        self._events = events
        self._on_broken = on_broken
        self.source = source
        self.num_completions = source.completions(spec)  # a ticket
        self._sampling, self._greedy = source.sampling(spec), source.greedy(spec)
        self._failures = 0
        self._told: set[str] = set()  # reward error kinds that have had their event

    async def generate(self, lease: Lease) -> Sampled | None:
        """Whole completions, or None when the attempt was given up in the ledger."""
        try:
            sampled = await self._sample(lease)
            flaw = _flaw(sampled, lease, self.source, with_greedy=self._greedy is not None)
        except Unavailable as error:
            # the engine is gone: the ticket is not to blame, and this node can do no more
            await patiently(lambda: self._ledger.release(lease))
            self._on_broken(error)
            return None
        except Exception as error:
            log.exception("a generation failed", extra=self.names(lease))
            flaw = error.kind if isinstance(error, HeadwayError) else type(error).__name__
        if not flaw:
            self._failures = 0
            return sampled
        await self._give_up(lease, flaw)
        return None

    async def score_and_deliver(self, lease: Lease, sampled: Sampled, generate_s: float) -> None:
        """Returns when the ledger has the group, counted it as filtered, or refused it."""
        scored = await score_group(
            self._scores,
            self._job_id,
            self._spec,
            lease,
            sampled.completions,
            sampled.greedy,
            self.source,
        )
        if scored.error_kind:
            await self._tell(lease, scored)
        group = Group(
            ticket=lease.ticket,
            completions=scored.completions,
            node_id=self._node_id,
            attempt=lease.attempt,
            start_version=lease.start_version,
            generate_s=generate_s,
            score_s=scored.score_s,
            baseline=scored.baseline,
        )
        payload = b"" if scored.filter_reason else pack_group(group)
        accepted = await patiently(
            lambda: self._ledger.deliver(lease, payload, scored.filter_reason)
        )
        if not accepted:
            log.warning("a late delivery was refused", extra=self.names(lease))
        outcome = scored.filter_reason.partition(":")[0] or "delivered"
        OUTCOMES.labels(outcome if accepted else "refused").inc()

    def share(self, num_members: int) -> int:
        """Tickets of this work that a node of so many may sample at once."""
        if self.source.pinned is not None:
            return sys.maxsize
        spec = self._spec
        may_start = spec.data.train_batch_size * (spec.algorithm.max_policy_lag + 1)
        return math.ceil(may_start / num_members)

    def portion(self, room: int, num_members: int) -> int:
        """Of so many tickets for which there is room: how many are claimed in one call.

        Where no lag rule shares the tickets out, nodes that begin together get their parts.
        """
        return room if self.source.pinned is None else math.ceil(room / (2 * num_members))

    async def claim(self, version: int, limit: int) -> ClaimResult:
        """Leases for this node."""
        return await self.source.claim(self._ledger, self._node_id, version, limit)

    async def renew(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Those of the leases that are still held."""
        return await patiently(lambda: self._ledger.renew(self._node_id, leases))

    async def release(self, lease: Lease) -> None:
        """Hands a ticket back."""
        OUTCOMES.labels("released").inc()
        await patiently(lambda: self._ledger.release(lease))

    def names(self, lease: Lease) -> dict[str, Any]:
        """What a log line about a lease carries."""
        return {
            "job_id": self._job_id,
            "ticket": lease.ticket.ticket_id,
            "attempt": lease.attempt,
            "version": self._engine.version,
        }

    async def _sample(self, lease: Lease) -> Sampled:
        """The ticket's completions, and the greedy one beside them; if either fails, both end."""
        ticket = lease.ticket
        request_id = f"{self._job_id}-{self.source.name}{ticket.ticket_id}-{lease.token}"
        drawn = self._engine.generate(
            request_id, ticket.prompt_ids, ticket.n, self._sampling, ticket.seed
        )
        if self._greedy is None:
            return Sampled(await drawn)
        likeliest = self._engine.generate(
            f"{request_id}-greedy", ticket.prompt_ids, 1, self._greedy, ticket.seed
        )
        tasks = [asyncio.ensure_future(drawn), asyncio.ensure_future(likeliest)]
        try:
            completions, greedy = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return Sampled(completions, greedy[0] if greedy else None)

    async def _give_up(self, lease: Lease, flaw: str) -> None:
        self._failures += 1
        OUTCOMES.labels("failed").inc()
        log.warning("an attempt is given up: %s", flaw, extra=self.names(lease))
        await patiently(lambda: self._ledger.fail(lease, f"generate:{flaw}"))
        if self._failures >= _MAX_FAILURES_IN_A_ROW:
            text = f"{self._failures} generations in a row failed, at last: {flaw}"
            self._on_broken(JobFailed(text))

    async def _tell(self, lease: Lease, scored: Scored) -> None:
        """One event for each kind of reward error; the ledger counts them all."""
        log.warning("no reward: %s", scored.error_message, extra=self.names(lease))
        if scored.error_kind in self._told:
            return
        self._told.add(scored.error_kind)
        text = f"ticket {lease.ticket.ticket_id} could not be scored: {scored.error_message}"
        fields = {
            "ticket_id": lease.ticket.ticket_id,
            "node_id": self._node_id,
            "error_kind": scored.error_kind,
            "policy": self._spec.reward.on_error,
        }
        await patiently(lambda: self._events.append_event("reward_errors", text, **fields))


def _flaw(sampled: Sampled, lease: Lease, source: TicketSource, *, with_greedy: bool) -> str:
    """Why a group must not be delivered, or "". A group is whole or it is nothing.

    The greedy completion is not trained on, so any version may have sampled it.
    """
    completions = sampled.completions
    every = completions if sampled.greedy is None else (*completions, sampled.greedy)
    if len(every) != lease.ticket.n + with_greedy:
        return "short_group"
    if any(completion.finish_reason == "aborted" for completion in every):
        return "aborted"
    if any(not completion.token_ids for completion in every):
        return "no_tokens"
    if source.pinned is not None:
        spans = (span for completion in completions for span in completion.spans)
        return "other_weights" if any(span.version != source.pinned for span in spans) else ""
    if min(completion.oldest_version for completion in completions) < lease.start_version:
        return "older_weights"  # the deadline in the ledger would not hold
    return ""
