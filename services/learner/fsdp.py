"""The FSDP2 strategy: any causal language model, whole on one rank or sharded over several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.jobspec import JobSpec
from services.learner.masters import float32_weights
from services.learner.model import decoder_shape, load_policy
from services.learner.placed import Placed
from services.learner.reference import load_reference
from services.learner.sharding import place
from services.learner.totals import Totals


def place_fsdp(
    path: Path, spec: JobSpec, dtype: torch.dtype, rank: int, world: int, device: torch.device
) -> Placed:
    """See `placed.Place`. Several ranks share the model, and each trains on its own groups."""
    policy = load_policy(path, gradient_checkpointing=spec.actor.gradient_checkpointing)
    place(policy, dtype, world, device)
    reference = load_reference(path, dtype, world, device) if spec.needs_reference else None
    return Placed(
        policy=policy,
        reference=reference,
        weights=float32_weights(policy.lm, dtype, world),
        shape=decoder_shape(policy),
        totals=Totals(world, device),
        named=lambda tensors: _named(policy.lm, tensors),
    )


def _named(lm: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    named: dict[str, Tensor] = revert_weight_conversion(lm, tensors)
    return named
