"""Prometheus metrics of the coordinator."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from headway.jobs import ENDED, STATES, JobRecord
from services.coordinator.fleet import Node

_JOBS = Gauge("headway_jobs", "Jobs that have not ended, by state.", ["state"])
_NODES = Gauge("headway_fleet_nodes", "Live processes, by role.", ["role"])
_EVENTS = Counter("headway_job_events", "Events the coordinator logged, by kind.", ["kind"])
_REDIS_UP = Gauge("headway_coordinator_redis_up", "1 while Redis answers.")


def show_fleet(jobs: Sequence[JobRecord], nodes: Sequence[Node]) -> None:
    """Sets the gauges to what a round of planning saw."""
    states = Tally(job.state for job in jobs)
    for state in STATES:
        if state not in ENDED:
            _JOBS.labels(state).set(states[state])
    roles = Tally(node.role for node in nodes)
    for role in ("learner", "rollout", "reward"):
        _NODES.labels(role).set(roles[role])


def count_event(kind: str) -> None:
    """Counts one event of a job."""
    _EVENTS.labels(kind).inc()


def show_redis(up: bool) -> None:
    """Whether Redis answers."""
    _REDIS_UP.set(up)
