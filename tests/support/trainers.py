"""Trainers of one rank over tiny models, and what tests compare of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.learner.trainer import FsdpTrainer
from tests.support.learning import job

CPU = torch.device("cpu")


def trainer(model: Path, **changes: Any) -> FsdpTrainer:
    """A trainer of `learning.job` with `changes`."""
    return FsdpTrainer(model, job(model, **changes), 0, 1, CPU)


def weights(t: FsdpTrainer) -> dict[str, Tensor]:
    """What would be published."""
    return dict(t.weights())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal names and equal bits."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
