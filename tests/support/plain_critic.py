"""PPO's critic written out plainly: padded batch, float64 weights, one token after another.

Values come from the model's own eager attention over a right-padded batch and a plain dot
product; advantages, targets and losses are scalar arithmetic (`rl_reference`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.jobspec import JobSpec
from headway.messages import Group
from tests.support import rl_reference as ref


@dataclass
class PlainCritic:
    """A body and a head in float64, with gradients."""

    lm: Any
    weight: Tensor  # [d]
    bias: Tensor  # scalar

    @staticmethod
    def load(folder: Path, weight: Tensor | None = None, bias: float = 0.0) -> PlainCritic:
        """The body of a model folder; a head of zeros unless one is given."""
        from transformers import AutoModelForCausalLM

        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        lm.set_attn_implementation("eager")
        size = lm.config.hidden_size
        head = torch.zeros(size) if weight is None else weight.detach().reshape(-1)
        return PlainCritic(
            lm,
            head.double().clone().requires_grad_(),
            torch.tensor(bias, dtype=torch.float64, requires_grad=True),
        )

    def parameters(self) -> dict[str, Tensor]:
        """By the names of `services.learner.critic.Critic`."""
        body = {f"lm.{n}": p for n, p in self.lm.base_model.named_parameters()}
        return {**body, "value_head.weight": self.weight, "value_head.bias": self.bias}

    def values(self, groups: Sequence[Group]) -> Tensor:
        """Of every token of every completion, [T], in order."""
        pairs = [(g.ticket.prompt_ids, c.token_ids) for g in groups for c in g.completions]
        width = max(len(p) + len(c) for p, c in pairs)
        ids = torch.zeros(len(pairs), width, dtype=torch.int64)
        attend = torch.zeros_like(ids)
        for i, (prompt, answer) in enumerate(pairs):
            ids[i, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            attend[i, : len(prompt) + len(answer)] = 1
        body = self.lm.base_model
        states = body(input_ids=ids, attention_mask=attend, use_cache=False).last_hidden_state
        table = (states.double() * self.weight).sum(-1) + self.bias
        return torch.cat(
            [table[i, len(p) - 1 : len(p) + len(c) - 1] for i, (p, c) in enumerate(pairs)]
        )


@dataclass
class PlainAim:
    """A step's advantages and targets: completions x tokens."""

    advantages: list[list[float]]  # whitened
    targets: list[list[float]]


def aim(
    groups: Sequence[Group],
    values: Sequence[float],
    spec: JobSpec,
    costs: list[list[float]] | None = None,
) -> PlainAim:
    """GAE of every completion, all of them graded and unmasked. `costs` come off token rewards."""
    made = [c for g in groups for c in g.completions]
    advantages, targets, at = [], [], 0
    for k, c in enumerate(made):
        n = len(c.token_ids)
        v = list(values[at : at + n])
        at += n
        rewards = [0.0] * n if costs is None else [-x for x in costs[k]]
        assert c.reward is not None
        rewards[-1] += c.reward
        a = ref.gae(rewards, v, [True] * n, spec.algorithm.gamma, spec.algorithm.lam)
        advantages.append(a)
        targets.append([x + y for x, y in zip(a, v, strict=True)])
    every = [[True] * len(a) for a in advantages]
    return PlainAim(ref.whiten(advantages, every), targets)


def value_loss(
    values: Tensor, old: Sequence[float], targets: Sequence[float], clip: float
) -> Tensor:
    """The mean over tokens of 0.5 max((V - R)², (V clipped to V_old ± clip - R)²)."""
    terms = []
    for v, before, target in zip(values, old, targets, strict=True):
        near = v.clamp(before - clip, before + clip)
        terms.append(0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2))
    return torch.stack(terms).mean()


def explained_variance(values: Sequence[float], targets: Sequence[float]) -> float:
    """1 - Var(R - V) / Var(R)."""

    def variance(of: Sequence[float]) -> float:
        m = math.fsum(of) / len(of)
        return math.fsum((x - m) ** 2 for x in of) / len(of)

    gaps = [r - v for r, v in zip(targets, values, strict=True)]
    return 1 - variance(gaps) / variance(list(targets))
