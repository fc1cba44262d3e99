"""Advantages a token: returns, GAE, and whitening over a batch.

Sequences are padded rows [N, T] with a mask bool [N, T] of the tokens that are steps of
the episode. Masked tokens (tool output, padding, a row with no token at all) are passed over:
they neither discount nor break the sum, their values and rewards are not looked at, and
their results are zero. (verl's `reinforce_plus_plus` restarts the return at a hole, so that
tokens before it would get nothing.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def outcome_rewards(outcomes: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [N, T]: the outcome [N] at the last unmasked token, zero elsewhere."""
    after = mask.long().flip(1).cumsum(dim=1).flip(1)  # unmasked tokens from here on
    here = mask & (after == 1)
    return torch.where(here, outcomes[:, None], torch.zeros_like(outcomes)[:, None])


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + γ G_{t+1} over the unmasked tokens of each row, [N, T].

    Source: REINFORCE++, arXiv:2501.03262, whose advantage is this, whitened.
    """
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0]) if rewards.shape[1] else None
    for t in reversed(range(rewards.shape[1])):
        assert running is not None
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = torch.where(mask[:, t], running, torch.zeros_like(running))
    return returns


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [N, T]; whitening comes after.

    δ_t = r_t + γ V_{t+1} - V_t with V = 0 after the last token, A_t = δ_t + γλ A_{t+1},
    and the critic's target A_t + V_t. t + 1 is the next unmasked token, as in verl.
    Source: GAE, arXiv:1506.02438, eq. 11 and 16.
    """
    advantages = torch.zeros_like(values)
    shape = values.shape[:1]
    following = torch.zeros(shape, dtype=values.dtype, device=values.device)
    running = following
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(here, delta + gamma * lam * running, running)
        following = torch.where(here, values[:, t], following)
        advantages[:, t] = torch.where(here, running, torch.zeros_like(running))
    zeros = torch.zeros_like(values)
    return advantages, torch.where(mask, advantages + values, zeros)


def whitened(values: Tensor, mean: float, variance: float) -> Tensor:
    """(x - mean) · rsqrt(variance + 1e-8), any shape.

    Mean and unbiased variance are over the tokens of the whole batch, over rows, mini-batches
    and ranks, as `moments_of` adds them up; verl's `masked_whiten`.
    """
    scale: float = (variance + WHITEN_EPS) ** -0.5
    return (values - mean) * scale


def unbiased_variance(square_sum: float, count: float) -> float:
    """Σ (x - mean)² / (count - 1); 0 for fewer than two values, which whiten to zero."""
    return square_sum / (count - 1) if count > 1 else 0.0


def explained_variance(
    values: Tensor, returns: Tensor, add_up: Callable[[Sequence[float]], list[float]]
) -> float:
    """1 - Var(R - V) / Var(R) over values [T] that lie on all ranks; NaN where R is constant.

    1: the critic foresees every return; 0: no better than one number for all; below 0: worse.
    `add_up` adds numbers up over the ranks. (verl adds 1e-5 to Var(R), and so has a number
    for constant returns.)
    """
    parts = (returns, returns - values)
    count, *sums = add_up([float(len(values)), *(float(x.sum()) for x in parts)])
    means = [total / max(count, 1.0) for total in sums]
    squares = add_up(
        [float((x - mean).square().sum()) for x, mean in zip(parts, means, strict=True)]
    )
    return 1.0 - squares[1] / squares[0] if squares[0] > 0 else float("nan")
