"""What a job's loop works with, and what passes through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from headway.jobspec import JobSpec
from headway.ledger.api import Ledger, LedgerConfig, TakeResult
from headway.messages import Group
from services.learner.crew import Crew
from services.learner.events import Events
from services.learner.feeder import Feeder
from services.learner.recording import Recorder
from services.learner.run_folder import RunFolder
from services.learner.saver import Saver
from services.learner.status import Reporter
from services.learner.validation import Validation


class Publishes(Protocol):
    """Sends versions to the rollout nodes (`headway.weights.publisher.Publisher`)."""

    async def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Any:
        """Returns when every live member has installed the version."""

    def retire(self) -> None:
        """Lets go of the version before, for the next to be staged."""

    async def admit(self) -> Any:
        """Lets nodes that lack the newest version catch up; waits for none."""

    async def close(self) -> None:
        """Ends the weight group."""


@dataclass(slots=True)
class Parts:
    """What a loop works with."""

    spec: JobSpec
    ledger: Ledger
    crew: Crew
    feeder: Feeder
    publisher: Publishes
    saver: Saver
    folder: RunFolder
    recorder: Recorder
    events: Events
    reporter: Reporter
    validation: Validation | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's groups, in order, and as they were delivered."""

    took: TakeResult
    groups: dict[int, Group]
    payloads: tuple[bytes, ...]


def ledger_config(spec: JobSpec) -> LedgerConfig:
    """A job's ledger settings."""
    return LedgerConfig(
        batch_groups=spec.data.train_batch_size,
        max_policy_lag=spec.algorithm.max_policy_lag,
        on_late=spec.algorithm.on_late,
        lease_s=spec.rollout.lease_s,
    )
