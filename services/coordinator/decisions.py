"""What the scheduler may decide about one job, and what each decision makes of its record.

Pure: a decision applied to a record gives the new record and the events to log, or
None when it no longer fits, so that it can be tried again on a record that someone
else changed in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headway.errors import InvalidSpec, NotFound
from headway.jobs import JobError, JobRecord, NodeFailure, Trigger, advance, can

MAX_NODE_FAILURES = 3  # a rollout node is not given the same job again after these
# Errors that come back however often one tries.
_HOPELESS = frozenset({InvalidSpec.kind, NotFound.kind})


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a job's history."""

    kind: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A new record and what is to be logged about it."""

    record: JobRecord
    events: tuple[Event, ...] = ()


class Decision(Protocol):
    """Something decided about the job `job_id`."""

    @property
    def job_id(self) -> str:
        """The job."""

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """The change it makes at time `now`; None when it no longer fits the record."""


@dataclass(frozen=True, slots=True)
class Start:
    """A queued job gets a learner and its first rollout nodes."""

    job_id: str
    learner: str
    rollouts: tuple[str, ...]

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """queued -> starting, one attempt more."""
        if not can(record.state, "assign"):
            return None
        attempt = record.attempt + 1
        names = ", ".join(self.rollouts)
        new = advance(
            record, "assign", now, learner=self.learner, lost_learner=None,
            rollouts=self.rollouts, attempt=attempt, waiting_for="",
        )  # fmt: skip
        where = {"learner": self.learner, "rollouts": list(self.rollouts), "attempt": attempt}
        message = f"assigned to learner {self.learner} and rollout nodes {names}"
        return Change(
            new,
            (
                Event("assigned", message, where),
                Event("starting", f"starting, attempt {attempt}", {"attempt": attempt}),
            ),
        )


@dataclass(frozen=True, slots=True)
class Adopt:
    """A learner that was thought lost is back and still at work on the job."""

    job_id: str
    learner: str

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """queued -> starting, the same attempt."""
        if not can(record.state, "assign") or record.lost_learner != self.learner:
            return None
        new = advance(
            record, "assign", now, learner=self.learner, lost_learner=None, waiting_for=""
        )
        message = f"learner {self.learner} is back and goes on with attempt {record.attempt}"
        return Change(new, (Event("assigned", message, {"learner": self.learner}),))


@dataclass(frozen=True, slots=True)
class AddRollouts:
    """Rollout nodes join a job that is under way."""

    job_id: str
    nodes: tuple[str, ...]

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """More rollout nodes, the same state."""
        new_nodes = tuple(n for n in self.nodes if n not in record.rollouts)
        if record.state not in ("starting", "running") or not new_nodes:
            return None
        new = replace(record, rollouts=record.rollouts + new_nodes, updated_at=now)
        return Change(new, tuple(_joined(node) for node in new_nodes))


@dataclass(frozen=True, slots=True)
class LoseRollout:
    """A rollout node left the fleet or fell silent; the job goes on."""

    job_id: str
    node: str
    reason: str

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """One rollout node less, the same state."""
        if self.node not in record.rollouts or record.ended:
            return None
        rest = tuple(n for n in record.rollouts if n != self.node)
        event = Event(
            "member_lost",
            f"rollout node {self.node} {self.reason}; {len(rest)} left",
            {"node_id": self.node},
        )
        return Change(replace(record, rollouts=rest, updated_at=now), (event,))


@dataclass(frozen=True, slots=True)
class DropRollout:
    """A rollout node gave the job up by itself."""

    job_id: str
    node: str
    error: JobError

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """One rollout node less and its failure noted, the same state."""
        if self.node not in record.rollouts or record.ended:
            return None
        before = record.rollout_failures.get(self.node)
        count = (before.count if before else 0) + 1
        if self.error.kind in _HOPELESS:
            count = MAX_NODE_FAILURES
        failure = NodeFailure(count, self.error.kind, self.error.message)
        rest = tuple(n for n in record.rollouts if n != self.node)
        new = replace(
            record,
            rollouts=rest,
            rollout_failures={**record.rollout_failures, self.node: failure},
            updated_at=now,
        )
        message = f"rollout node {self.node} failed: {self.error.message}; {len(rest)} left"
        fields = {"node_id": self.node, "error_kind": self.error.kind}
        return Change(new, (Event("member_lost", message, fields),))


@dataclass(frozen=True, slots=True)
class LoseLearner:
    """The learner left the fleet or fell silent: the job waits for another."""

    job_id: str
    node: str
    reason: str

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """starting, running -> queued; cancelling -> cancelled."""
        if record.learner != self.node or not can(record.state, "lose_learner"):
            return None
        message = f"learner {self.node} {self.reason}"
        lost = Event("member_lost", message, {"node_id": self.node, "attempt": record.attempt})
        new = advance(record, "lose_learner", now, learner=None, lost_learner=self.node)
        if new.ended:
            return Change(new, (lost, Event("cancelled", f"cancelled: {message}")))
        return Change(new, (lost,))


@dataclass(frozen=True, slots=True)
class Running:
    """The learner trains."""

    job_id: str

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """starting -> running."""
        if not can(record.state, "run"):
            return None
        new = advance(record, "run", now)
        return Change(new, (Event("running", f"running on learner {record.learner}"),))


@dataclass(frozen=True, slots=True)
class Progress:
    """Optimiser steps done, and where the run folder is."""

    job_id: str
    step: int
    run_dir: str

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """The same state; nothing to log, the learner writes a row a step."""
        if record.ended or (record.step, record.run_dir) == (self.step, self.run_dir):
            return None
        new = replace(record, step=self.step, run_dir=self.run_dir, updated_at=now)
        if self.step > record.best_step:  # not one that is only retraced
            new = replace(new, best_step=self.step, best_attempt=record.attempt)
        return Change(new)


@dataclass(frozen=True, slots=True)
class End:
    """The job is over."""

    job_id: str
    trigger: Trigger  # succeed, fail or stop
    error: JobError | None
    step: int
    run_dir: str

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """any state under way -> succeeded, failed or cancelled."""
        if not can(record.state, self.trigger):
            return None
        new = advance(
            record, self.trigger, now, error=self.error, step=self.step, run_dir=self.run_dir
        )
        total = record.total_steps
        done = f"{self.step} of {total} steps" if total else f"{self.step} prompts"
        message = f"{new.state} after {done}"
        if self.error is not None:
            message += f": {self.error.message}"
        fields: dict[str, Any] = {"step": self.step}
        if self.error is not None:
            fields["error_kind"] = self.error.kind
        return Change(new, (Event(new.state, message, fields),))


@dataclass(frozen=True, slots=True)
class Wait:
    """What the job lacks, or "" when it lacks nothing any more."""

    job_id: str
    missing: str

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """The same state; logged whenever it changes to something."""
        if record.ended or record.waiting_for == self.missing:
            return None
        new = replace(record, waiting_for=self.missing, updated_at=now)
        if not self.missing:
            return Change(new)
        return Change(new, (Event("waiting", f"waiting for {self.missing}"),))


@dataclass(frozen=True, slots=True)
class Cancel:
    """A user wants the job's end."""

    job_id: str

    def apply(self, record: JobRecord, now: float) -> Change | None:
        """queued -> cancelled; starting, running -> cancelling. Conflict when ended otherwise."""
        new = advance(record, "cancel", now)
        if new.state == record.state:
            return None
        if new.state == "cancelled":
            return Change(new, (Event("cancelled", "cancelled while it was queued"),))
        return Change(new, (Event("cancelling", "cancelling: asked by a user"),))


def _joined(node: str) -> Event:
    return Event("member_joined", f"rollout node {node} joins", {"node_id": node})
