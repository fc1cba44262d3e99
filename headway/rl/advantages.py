"""Advantages: how much better a completion was than what it is compared with.

Group functions take rewards [groups, n] (float32 or float64), graded bool [groups, n]
(which rewards exist) and, where they matter, lengths int [groups, n] (unmasked tokens). They
return one number a completion, [groups, n], zero where not graded. Every mean is over the
graded completions of its group, and a group with fewer than two of them compares nothing:
zero, so it has no gradient. (verl turns the raw reward of a lone completion into its
advantage, in `grpo`, `rloo` and `opo`.) Equal rewards give exactly zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6


def grpo(rewards: Tensor, graded: Tensor, *, norm_by_std: bool = True) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + 1e-6) over each group.

    The standard deviation is unbiased and eps is 1e-6, as in verl (TRL: 1e-4).
    `norm_by_std=False` leaves r - mean (`dr_grpo`).
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    count = graded.sum(dim=1, keepdim=True)
    kept = torch.where(graded, rewards, torch.zeros_like(rewards))
    mean = kept.sum(dim=1, keepdim=True) / count.clamp(min=1)
    centred = _compared(rewards - mean, rewards, graded)
    if not norm_by_std:
        return centred
    variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + EPS)


def dr_grpo(rewards: Tensor, graded: Tensor) -> Tensor:
    """r - mean of the group. Source: Dr. GRPO, arXiv:2503.20783.

    verl: `grpo` with `norm_adv_by_std_in_grpo: false`. The paper's constant length is
    `aggregate`'s business.
    """
    return grpo(rewards, graded, norm_by_std=False)


def rloo(rewards: Tensor, graded: Tensor) -> Tensor:
    """r - mean of the other completions of the group.

    Source: Ahmadian et al., arXiv:2402.14740.
    """
    count = graded.sum(dim=1, keepdim=True)
    total = torch.where(graded, rewards, torch.zeros_like(rewards)).sum(dim=1, keepdim=True)
    others = (total - rewards) / (count - 1).clamp(min=1)
    return _compared(rewards - others, rewards, graded)


def opo(rewards: Tensor, graded: Tensor, lengths: Tensor) -> Tensor:
    """r - Σ len r / Σ len: the baseline of least variance when long answers have larger gradients.

    Source: OPO, arXiv:2505.23585. A group whose completions are all empty
    has the baseline 0 (and no token to train).
    """
    weights = torch.where(graded, lengths, torch.zeros_like(lengths)).to(rewards.dtype)
    kept = torch.where(graded, rewards, torch.zeros_like(rewards))
    baseline = (weights * kept).sum(dim=1, keepdim=True)
    baseline = baseline / weights.sum(dim=1, keepdim=True).clamp(min=1)
    return _compared(rewards - baseline, rewards, graded)


def grpo_passk(rewards: Tensor, graded: Tensor) -> Tensor:
    """r_max - r_second for the best completion of the group, zero for the others.

    When two are best the difference is zero, and so is every advantage.
    Source: Pass@k training, arXiv:2503.19595. verl divides by std + 1e-6 as well, unless
    `norm_adv_by_std_in_grpo` is off; here it is never divided.
    """
    if rewards.shape[1] < 2:
        return torch.zeros_like(rewards)
    best, where = torch.where(graded, rewards, -torch.inf).topk(2, dim=1)
    gap = (best[:, :1] - best[:, 1:]).expand_as(rewards)
    won = torch.zeros_like(graded).scatter(1, where[:, :1], True)
    return _compared(torch.where(won, gap, torch.zeros_like(gap)), rewards, graded)


def remax(rewards: Tensor, graded: Tensor, greedy_rewards: Tensor) -> Tensor:
    """r - reward of the greedy completion of the same prompt.

    greedy_rewards [groups]; not finite where there is none, which makes the group's
    advantages so. A group of one has an advantage here: its baseline is outside of it.
    The greedy completion is sampled beside the n, is scored like them and is not trained on.
    Source: ReMax, arXiv:2310.10505.
    """
    return torch.where(graded, rewards - greedy_rewards[:, None], torch.zeros_like(rewards))


def varied(rewards: Tensor, graded: Tensor) -> Tensor:
    """Which groups tell good from bad: two graded rewards that differ. bool [groups].

    Compares rewards, not a rounded standard deviation, so equal rewards such as
    0.1 three times are seen as equal. A reward that is not finite counts as varied, so
    that it reaches the loss, where the step is skipped and counted.
    """
    low = torch.where(graded, rewards, torch.inf).amin(dim=1)
    high = torch.where(graded, rewards, -torch.inf).amax(dim=1)
    differ: Tensor = ~(high <= low) & (graded.sum(dim=1) > 1)
    return differ


def _compared(values: Tensor, rewards: Tensor, graded: Tensor) -> Tensor:
    """Values of graded completions in varied groups, zero elsewhere."""
    return torch.where(graded & varied(rewards, graded)[:, None], values, torch.zeros_like(values))
