"""Advantages: how much better a completion was than its group."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6


def grpo(rewards: Tensor, graded: Tensor, *, norm_by_std: bool = True) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + 1e-6) over each group.

    rewards [groups, n] float32 or float64; graded bool [groups, n] says which rewards
    exist. Returns [groups, n], zero where not graded. Mean and std are over the graded
    completions of the group; std is unbiased and eps is 1e-6, as in verl (TRL: 1e-4).
    `norm_by_std=False` leaves r - mean (Dr. GRPO, arXiv:2503.20783).

    A group with fewer than two graded completions compares nothing: its advantages are
    zero, so it has no gradient. (verl uses mean 0 and std 1 there, which turns the raw
    reward into an advantage.) Equal rewards give exactly zero.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    count = graded.sum(dim=1, keepdim=True)
    kept = torch.where(graded, rewards, torch.zeros_like(rewards))
    mean = kept.sum(dim=1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(graded, rewards - mean, torch.zeros_like(rewards))
    centred = torch.where(varied(rewards, graded)[:, None], centred, torch.zeros_like(centred))
    if not norm_by_std:
        return centred
    variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + EPS)


def varied(rewards: Tensor, graded: Tensor) -> Tensor:
    """Which groups have a gradient: two graded rewards that differ. bool [groups].

    Compares rewards, not a rounded standard deviation, so equal rewards such as
    0.1 three times are seen as equal. A reward that is not finite counts as varied, so
    that it reaches the loss, where the step is skipped and counted.
    """
    low = torch.where(graded, rewards, torch.inf).amin(dim=1)
    high = torch.where(graded, rewards, -torch.inf).amax(dim=1)
    differ: Tensor = ~(high <= low) & (graded.sum(dim=1) > 1)
    return differ
