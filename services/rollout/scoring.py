"""From sampled completions to scored ones, or the reason why the group is filtered.

A failed scoring is never a zero: the group is scored again, filtered or made to fail
the job, as `reward.on_error` says. A reward service that cannot be reached is waited
for; the node then soon samples no more, since what waits for scores is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prometheus_client import Counter

from headway.errors import HeadwayError, InvalidSpec, NoCapacity, Unavailable
from headway.graders import validate_grader
from headway.jobspec import JobSpec
from headway.ledger.api import Lease
from headway.messages import Baseline, Completion, Score, ScoreItem
from headway.telemetry import get_logger
from services.rollout.sources import TRAINING, TicketSource

log = get_logger(__name__)
_FIRST_PAUSE_S = 0.2  # before a second scoring; doubles
ZERO_VARIANCE = "zero_variance"
NULLS = Counter(
    "headway_rollout_null_rewards", "Completions without a reward, and what their group comes to",
    ["error_kind", "then"],
)  # fmt: skip


class Scores(Protocol):
    """Where rewards come from (`headway.reward_client.RewardClient`)."""

    async def score(
        self,
        request_id: str,
        job_id: str,
        grader: Mapping[str, Any],
        items: Sequence[ScoreItem],
        timeout_s: float,
    ) -> tuple[Score, ...]:
        """One score an item, in order."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A group's completions with their rewards; `filter_reason` is "" when it is to be trained."""

    completions: tuple[Completion, ...]
    filter_reason: str
    error_kind: str  # of the first completion that has no reward, or ""
    error_message: str
    score_s: float
    baseline: Baseline | None = None


async def score_group(
    scores: Scores,
    job_id: str,
    spec: JobSpec,
    lease: Lease,
    completions: tuple[Completion, ...],
    greedy: Completion | None = None,
    source: TicketSource = TRAINING,
) -> Scored:
    """Scores all completions of a lease's ticket, and the greedy one they are compared with.

    All n are one group to the service, scored again as a whole where the grader needs
    whole groups. Of held-out prompts nothing is filtered: who reads the scores sees the errors.
    Else the filter reason is `reward_error:<kind>` when any has no reward at last, and
    `zero_variance` when all are equal and `algorithm.dynamic_sampling` is on.
    """
    clock = asyncio.get_running_loop().time
    started = clock()
    grader = source.grader(spec, lease.ticket)
    scored = list(completions) if greedy is None else [*completions, greedy]
    rounds = 1 + (spec.reward.max_rescores if spec.reward.on_error == "rescore" else 0)
    for number in range(rounds):
        missing = [i for i, completion in enumerate(scored) if completion.reward is None]
        if not missing:
            break
        if number and missing[0] < len(completions) and _whole_groups(grader):
            missing = [*range(len(completions)), *(i for i in missing if i >= len(completions))]
        if number:
            await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (number - 1))
        ticket = lease.ticket
        items = [
            ScoreItem(
                ticket.prompt,
                scored[i].text,
                ticket.item,
                str(ticket.ticket_id) if i < len(completions) else "",  # greedy: none of the n
                len(scored[i].token_ids),
            )
            for i in missing
        ]
        # a repeat of one request id gives the same answer; a new round wants a new one
        request_id = f"{job_id}/{source.name}{ticket.ticket_id}/{lease.token}/{number}"
        answers = await _scores(scores, request_id, job_id, grader, spec.reward.timeout_s, items)
        for i, answer in zip(missing, answers, strict=True):
            scored[i] = _with_score(scored[i], answer)
        _count(answers, "rescore" if number + 1 < rounds else _last_resort(spec, source))
    failed = next((completion for completion in scored if completion.reward is None), None)
    kind, message = (failed.error_kind, failed.error_message) if failed is not None else ("", "")
    reason = _judge(scored, kind, spec) if source.pinned is None else ""
    baseline = None
    if greedy is not None and (last := scored.pop()).reward is not None:
        baseline = Baseline(last.reward, len(last.token_ids))
    return Scored(tuple(scored), reason, kind, message, clock() - started, baseline)


def _whole_groups(grader: Mapping[str, Any]) -> bool:
    """Whether a completion can only be scored together with all others of its prompt."""
    try:
        return validate_grader(grader).whole_group()
    except InvalidSpec:
        return False  # the service has said so, too


async def _scores(
    scores: Scores,
    request_id: str,
    job_id: str,
    grader: Mapping[str, Any],
    timeout_s: float,
    items: Sequence[ScoreItem],
) -> tuple[Score, ...]:
    """One score an item. A call that fails is an error of every item in it."""
    while True:
        try:
            return await scores.score(request_id, job_id, grader, items, timeout_s)
        except (Unavailable, NoCapacity) as error:
            # the client has waited between its own tries
            log.warning("no scores yet: %s", error, extra={"job_id": job_id})
            await asyncio.sleep(error.retry_after_s or _FIRST_PAUSE_S)
        except HeadwayError as error:
            log.warning("scoring failed: %s", error, extra={"job_id": job_id})
            return (Score(None, error_kind=error.kind, error_message=str(error)),) * len(items)


def _last_resort(spec: JobSpec, source: TicketSource) -> str:
    """What becomes of a group that has a null when it is not scored again."""
    if source.pinned is not None:
        return "keep"
    return "fail" if spec.reward.on_error == "fail" else "drop_group"


def _count(answers: Sequence[Score], then: str) -> None:
    for answer in answers:
        if answer.reward is None:
            NULLS.labels(answer.error_kind or "unknown", then).inc()


def _with_score(completion: Completion, score: Score) -> Completion:
    failed = score.reward is None
    return replace(
        completion,
        reward=score.reward,
        parts=score.parts,
        error_kind=(score.error_kind or "unknown") if failed else "",
        error_message=score.error_message if failed else "",
    )


def _judge(scored: Sequence[Completion], error_kind: str, spec: JobSpec) -> str:
    """Why a scored group is filtered, or ""."""
    if error_kind:
        return f"reward_error:{error_kind}"
    rewards = {completion.reward for completion in scored}
    return ZERO_VARIANCE if spec.algorithm.dynamic_sampling and len(rewards) == 1 else ""
