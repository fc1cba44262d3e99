"""Trainers with a critic over tiny models, and what tests read of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.learner.trainer import FsdpTrainer

PPO: dict[str, Any] = {"algorithm__adv_estimator": "gae", "critic__optim__lr": 1e-2}


def with_head(t: FsdpTrainer, seed: int = 0) -> FsdpTrainer:
    """Gives the critic a head that says something."""
    assert t.critic is not None
    rng = torch.Generator().manual_seed(seed)
    state = t.state()
    head = state["critic_model"]["value_head.weight"]
    head.copy_(0.3 * torch.randn(head.shape, generator=rng))
    state["critic_model"]["value_head.bias"].fill_(0.25)
    t.load_state(state)
    return t


def critic_weights(t: FsdpTrainer) -> dict[str, Tensor]:
    """Copies of its float32 weights and head, by name."""
    return {n: p.clone() for n, p in t.state()["critic_model"].items()}
