"""The policy that a job started from, frozen, for a KL."""

from __future__ import annotations

from pathlib import Path

import torch

from services.learner.model import Policy, load_policy
from services.learner.sharding import place


def load_reference(path: Path, dtype: torch.dtype, world: int, device: torch.device) -> Policy:
    """The model of a folder in the compute dtype, sharded like the policy; nothing trains it."""
    reference = load_policy(path)
    for parameter in reference.lm.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.detach().to(dtype)
    place(reference, dtype, world, device)
    return reference
