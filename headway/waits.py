"""What a process waits for at this moment, so that a hang can say who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

Reason = Literal[
    "groups",  # learner: for the groups of a step
    "publish",  # learner: for the version before to be installed
    "nodes",  # learner: for rollout nodes to turn up
    "validation",  # learner: for the validation of an older version
    "checkpoint",  # learner: for the checkpoint before to be written
    "peer",  # anyone: for Redis or a service that is away
    "engine",  # rollout node: for its engine to start
    "weights",  # rollout node: for weights, the first or after a broken install
    "schedule",  # rollout node: the lag rule or the bound on bytes leaves no room
    "tickets",  # rollout node: nothing is issued
    "sampling",  # rollout node: its oldest ticket is being sampled
    "scores",  # rollout node: its oldest sampled ticket has no scores yet
    "drain",  # any service: it stops, and finishes what it has
    "queue",  # reward service: its oldest request
]
REASONS: frozenset[str] = frozenset(get_args(Reason))


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait. `detail` says for whom, for people; `job_id` is empty where it is no one job's."""

    reason: Reason
    detail: str
    waited_s: float
    job_id: str = ""


class Waiting:
    """The waits that a process has begun and not ended."""

    def __init__(self) -> None:
        self._since: dict[object, tuple[float, Reason, str]] = {}

    @contextmanager
    def on(self, reason: Reason, detail: str = "") -> Iterator[None]:
        """The block waits for this."""
        key = object()
        self._since[key] = (time.monotonic(), reason, detail)
        try:
            yield
        finally:
            del self._since[key]

    def longest(self) -> Wait | None:
        """The wait that began first, or None."""
        if not self._since:
            return None
        since, reason, detail = min(self._since.values(), key=lambda entry: entry[0])
        return Wait(reason, detail, time.monotonic() - since)
