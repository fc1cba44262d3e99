"""A job's states and what may follow what. Pure values: no clock, no IO.

queued ──assign──> starting ──run──> running ──> succeeded | failed | cancelled
  ^                   │                 │
  └────lose_learner───┴─────────────────┘        (attempt + 1 at the next assign)

cancel: queued ends at once; starting and running become `cancelling` until
the learner says that it has stopped, or is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from headway.errors import Conflict, InvalidSpec

State = Literal["queued", "starting", "running", "cancelling", "succeeded", "failed", "cancelled"]
Trigger = Literal["assign", "run", "lose_learner", "cancel", "stop", "succeed", "fail"]

STATES: tuple[State, ...] = (
    "queued", "starting", "running", "cancelling", "succeeded", "failed", "cancelled",
)  # fmt: skip
ENDED: frozenset[State] = frozenset({"succeeded", "failed", "cancelled"})

JOB_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_NEXT: dict[tuple[State, Trigger], State] = {
    ("queued", "assign"): "starting",
    ("queued", "cancel"): "cancelled",
    # A queued job may have been running on a learner that was thought lost and
    # comes back with the job's end: what really happened counts.
    ("queued", "stop"): "cancelled",
    ("queued", "succeed"): "succeeded",
    ("queued", "fail"): "failed",
    ("starting", "run"): "running",
    ("starting", "lose_learner"): "queued",
    ("starting", "cancel"): "cancelling",
    ("starting", "stop"): "cancelled",
    ("starting", "succeed"): "succeeded",
    ("starting", "fail"): "failed",
    ("running", "lose_learner"): "queued",
    ("running", "cancel"): "cancelling",
    ("running", "stop"): "cancelled",
    ("running", "succeed"): "succeeded",
    ("running", "fail"): "failed",
    # The user asked for the end: how the learner comes to it matters no more,
    # unless it was already through.
    ("cancelling", "lose_learner"): "cancelled",
    ("cancelling", "stop"): "cancelled",
    ("cancelling", "fail"): "cancelled",
    ("cancelling", "succeed"): "succeeded",
    ("cancelling", "cancel"): "cancelling",
    ("cancelled", "cancel"): "cancelled",
}


def transition(state: State, trigger: Trigger) -> State:
    """The state after `trigger`. Conflict when it cannot happen in `state`."""
    try:
        return _NEXT[state, trigger]
    except KeyError:
        raise Conflict(f"a job that is {state} cannot {trigger.replace('_', ' ')}") from None


def can(state: State, trigger: Trigger) -> bool:
    """Whether `trigger` may happen in `state`."""
    return (state, trigger) in _NEXT


def progress(step: int, total_steps: int) -> str:
    """How far a job is, for people: its steps, or the prompts of one that trains nothing."""
    return f"step {step} of {total_steps}" if total_steps else f"{step} prompts"


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed: a kind of headway/errors.py (or a node's own) and a text for people."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """How often a rollout node gave one job up, and its last reason."""

    count: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class JobRecord:
    """All the coordinator knows of one job. Times are seconds since 1970, UTC."""

    job_id: str
    spec: Mapping[str, Any]  # the resolved specification, every default written out
    body_digest: str  # SHA-256 of the resolved specification: same id, same digest, same job
    created_at: float
    updated_at: float
    state: State = "queued"
    started_at: float | None = None  # first seen running
    ended_at: float | None = None
    attempt: int = 0  # starts on a learner so far
    best_step: int = 0  # the furthest that any attempt came
    best_attempt: int = 0  # the last attempt that came further than those before
    learner: str | None = None
    lost_learner: str | None = None  # had the job last; may still come back with it
    rollouts: tuple[str, ...] = ()
    rollout_failures: Mapping[str, NodeFailure] = field(default_factory=dict)
    error: JobError | None = None
    step: int = 0  # optimiser steps done; of an eval job prompts
    run_dir: str = ""  # on the learner's host; empty until it says
    waiting_for: str = ""  # what a queued or starved job lacks, for people

    @property
    def total_steps(self) -> int:
        """Optimiser steps the job is to take; 0 where it trains nothing."""
        trainer = self.spec.get("trainer")
        return int(trainer["total_training_steps"]) if trainer is not None else 0

    @property
    def min_nodes(self) -> int:
        """Rollout nodes needed to start."""
        return int(self.spec["rollout"]["min_nodes"])

    @property
    def max_nodes(self) -> int | None:
        """Rollout nodes used at most; None: as many as there are."""
        limit = self.spec["rollout"]["max_nodes"]
        return None if limit is None else int(limit)

    @property
    def ended(self) -> bool:
        """Succeeded, failed or cancelled: nothing changes any more."""
        return self.state in ENDED


def advance(record: JobRecord, trigger: Trigger, now: float, **changes: Any) -> JobRecord:
    """The record after `trigger` at time `now`, with further field changes.

    Raises Conflict when the trigger cannot happen in the record's state.
    """
    try:
        state = transition(record.state, trigger)
    except Conflict as error:
        raise Conflict(f"job {record.job_id}: {error}") from None
    if state == "running" and record.started_at is None:
        changes["started_at"] = now
    if state in ENDED and not record.ended:
        changes["ended_at"] = now
        changes["waiting_for"] = ""
    return replace(record, state=state, updated_at=now, **changes)


def check_job_id(job_id: str) -> str:
    """The id itself. InvalidSpec when it is not a lower-case name of at most 63 characters."""
    if not JOB_ID.fullmatch(job_id):
        raise InvalidSpec(
            f"job id {job_id[:80]!r} is not 1 to 63 lower-case letters, digits and inner hyphens"
        )
    return job_id


def record_to_dict(record: JobRecord) -> dict[str, Any]:
    """The record as plain JSON data, with `total_steps`."""
    plain = asdict(record)
    plain["rollouts"] = list(record.rollouts)
    plain["total_steps"] = record.total_steps
    return plain


def record_from_dict(plain: Mapping[str, Any]) -> JobRecord:
    """A record from `record_to_dict`'s data; keys of a later version are passed over."""
    known = {f.name for f in fields(JobRecord)}
    values = {key: value for key, value in plain.items() if key in known}
    values["rollouts"] = tuple(values.get("rollouts", ()))
    failures = values.get("rollout_failures") or {}
    values["rollout_failures"] = {node: NodeFailure(**f) for node, f in failures.items()}
    error = values.get("error")
    values["error"] = JobError(**error) if error else None
    return JobRecord(**values)
