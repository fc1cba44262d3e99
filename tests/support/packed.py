"""Tiny random policies of any family, and what packed rows make of some samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from headway.rl.packing import Sample, pack
from services.learner import attention
from services.learner.model import DeviceRow, Policy, prepare
from tests.support.learning import random_groups

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def policy_of(config: Any) -> Policy:
    """A random float32 model of a configuration."""
    AttentionInterface.register(attention.NAME, attention.tree_attention)
    torch.manual_seed(0)
    return prepare(
        AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention.NAME
        )
    )


def samples_of(seed: int = 1) -> list[Sample]:
    """Twelve completions of three prompts that begin alike."""
    groups = random_groups(3, 4, vocabulary=96, seed=seed)
    return [Sample(g.ticket.prompt_ids, c.token_ids) for g in groups for c in g.completions]


def gradients(policy: Policy) -> dict[str, Tensor]:
    """The policy's gradients, taken off it."""
    found = {n: p.grad.clone() for n, p in policy.lm.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


def packed(
    policy: Policy, samples: list[Sample], slopes: Tensor, row_tokens: int, temperature: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """log π of all tokens and the gradient of Σ slope · log π."""
    logprobs = torch.zeros(len(slopes))
    for row in pack(samples, row_tokens):
        placed = DeviceRow.of(row, CPU)
        out = policy(placed, temperature, lambda lp, s, f=placed.flat: (slopes[f[s]] * lp).sum())
        out.loss.backward()
        logprobs[placed.flat] = out.logprobs
    return logprobs, gradients(policy)


def close(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Gradients agree to 1e-4 of the largest entry."""
    assert mine.keys() == other.keys()
    largest = max(float(g.abs().max()) for g in other.values())
    for name, gradient in other.items():
        gap = float((mine[name] - gradient).abs().max())
        assert gap < 1e-4 * largest, (name, gap, largest)
