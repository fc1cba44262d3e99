"""A policy on the ranks of a job: all that a training step and a publish need of it.

What differs between strategies (`actor.strategy`) ends here: the steps, the optimiser,
checkpoints and publishes are the same for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headway.jobspec import JobSpec
from headway.rl.flops import DecoderShape
from services.learner.masters import Weights
from services.learner.model import RunsRows
from services.learner.totals import Totals
from services.learner.trained import Written


@dataclass(frozen=True, slots=True)
class Placed:
    """One rank's part of a policy. Ranks that share a model run their rows together."""

    policy: RunsRows
    reference: RunsRows | None  # as the policy is before any step; where the job needs one
    weights: Weights
    shape: DecoderShape  # of the whole model
    totals: Totals  # over the ranks that train on groups of their own
    named: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """Whole tensors by parameter, under the names by which they are published."""
    written: Written


class Place(Protocol):
    """A strategy: how a model gets onto ranks."""

    def __call__(
        self,
        path: Path,
        spec: JobSpec,
        dtype: torch.dtype,
        rank: int,
        world: int,
        device: torch.device,
        /,
    ) -> Placed:
        """Loads the model of a Hugging Face folder; matrix products are in `dtype`.

        A collective over the ranks. InvalidSpec when the folder or its architecture cannot be
        trained.
        """
