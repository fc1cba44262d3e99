"""Where a node's tickets come from: what a job trains on, and what it is evaluated on.

The prompts of an eval job stand in the job's ledger, those of a validation in a ledger of their
own beside it. Both are *pinned*: every token must be of one version. In such a ledger the lag rule
has nothing to say: all claims are made at its version 0 and its bound is never reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import NotFound
from headway.jobspec import JobSpec
from headway.ledger.api import ClaimResult, Ledger
from headway.messages import Ticket
from services.rollout.engine import Sampling
from services.rollout.engines import greedy_of, sampling_of


@dataclass(frozen=True, slots=True)
class TicketSource:
    """How the tickets of one ledger are sampled and judged."""

    name: str = ""  # goes before ticket ids in requests, whose ids must differ between ledgers
    pinned: int | None = None  # the version that must sample every token; None: the lag rule's

    def grader(self, spec: JobSpec, ticket: Ticket) -> Mapping[str, Any]:
        """What grades a ticket. A held-out prompt's `data_epoch` is the number of its data set."""
        if self.pinned is None:
            return spec.reward.grader
        own = spec.evaluation.data[ticket.data_epoch].grader
        return spec.reward.grader if own is None else own

    def sampling(self, spec: JobSpec) -> Sampling:
        """How completions are drawn."""
        return sampling_of(spec) if self.pinned is None else held_out_sampling(spec)

    def greedy(self, spec: JobSpec) -> Sampling | None:
        """How the completion is drawn that the others are compared with; None: there is none."""
        asked = self.pinned is None and spec.algorithm.greedy_baseline
        return greedy_of(spec) if asked else None

    def completions(self, spec: JobSpec) -> int:
        """What is sampled for one ticket."""
        return spec.completions_a_ticket if self.pinned is None else spec.evaluation.n

    async def claim(self, ledger: Ledger, node_id: str, version: int, limit: int) -> ClaimResult:
        """Leases for a node at `version`, which is that of a pinned source."""
        if self.pinned is None:
            return await ledger.claim(node_id, version, limit)
        try:
            claimed = await ledger.claim(node_id, 0, limit)
        except NotFound:
            if not self.name:
                raise
            return ClaimResult((), "empty")  # its end was so long ago that it is forgotten
        leases = (replace(lease, start_version=self.pinned) for lease in claimed.leases)
        return replace(claimed, leases=tuple(leases))


TRAINING = TicketSource()
EVAL_JOB = TicketSource(pinned=0)


def validation(version: int) -> TicketSource:
    """The held-out prompts of a job that trains, at one of its versions."""
    return TicketSource(f"val-{version}/", version)


def held_out_sampling(spec: JobSpec) -> Sampling:
    """How completions of held-out prompts are drawn."""
    asked = spec.evaluation
    return Sampling(
        max_tokens=spec.max_answer,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=spec.rollout.stop,
    )
