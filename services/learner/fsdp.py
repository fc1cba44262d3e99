"""The FSDP2 strategy: any causal language model, whole on one rank or sharded over several."""

from __future__ import annotations

from pathlib import Path

import torch

from headway.jobspec import JobSpec
from services.learner.masters import float32_weights
from services.learner.model import decoder_shape, load_policy
from services.learner.placed import Placed
from services.learner.sharding import place
from services.learner.totals import Totals
from services.learner.trained import trained_part


def place_fsdp(
    path: Path, spec: JobSpec, dtype: torch.dtype, rank: int, world: int, device: torch.device
) -> Placed:
    """See `placed.Place`. Several ranks share the model, and each trains on its own groups."""
    policy = load_policy(path, gradient_checkpointing=spec.actor.gradient_checkpointing)
    trained = trained_part(policy, spec, path)
    trained.freeze(dtype)
    place(policy, dtype, world, device)
    return Placed(
        policy=policy,
        reference=trained.reference(dtype, world, device) if spec.needs_reference else None,
        weights=float32_weights(policy.lm, dtype, world),
        shape=decoder_shape(policy),
        totals=Totals(world, device),
        named=trained.named,
        written=trained,
    )
