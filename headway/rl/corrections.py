"""Corrections for completions that another policy sampled.

μ sampled the token, π_old is the learner's policy when the step starts, π is being
trained. A correction chooses the proximal policy of the clip and a weight per token
that carries no gradient. Log-ratios are clamped to ±20.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.rl.losses import clamped_log_ratio

Kind = Literal["none", "tis", "icepop", "decoupled"]


@dataclass(frozen=True, slots=True)
class Correction:
    """What the loss uses: loss = weights * ppo_clip(π, proximal)."""

    proximal: Tensor  # [T] log-probs of the policy the clip compares with
    weights: Tensor  # [T] multiplies each token's loss
    kept: Tensor  # bool [T]: false where the correction masked the token


def correct(
    kind: Kind,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    tis_cap: float = 2.0,
    icepop_low: float = 0.5,
    icepop_high: float = 5.0,
) -> Correction:
    """The correction of each token, from w = π_old / μ. All [T], no gradient.

    - `none`: π_old := μ, weight 1: the clip alone is trusted.
    - `tis`: weight min(w, C). Truncated importance sampling (Yao et al., 2025).
    - `icepop`: weight w where low <= w <= high, else 0 (IcePop, arXiv:2510.18855).
    - `decoupled`: weight w, the clip on π/π_old (arXiv:2110.00641, eq. 5; AReaL,
      arXiv:2505.24298, eq. 5).

    Tokens that `icepop` masks leave the numerator only: the mean keeps the count
    before the mask, so `kept` must not shrink the denominator.
    """
    old, mu = old_logprobs.detach(), rollout_logprobs.detach()
    ratio = clamped_log_ratio(old, mu).exp()
    everything = torch.ones_like(ratio, dtype=torch.bool)
    if kind == "none":
        return Correction(mu, torch.ones_like(ratio), everything)
    if kind == "tis":
        return Correction(old, ratio.clamp(max=tis_cap), everything)
    if kind == "icepop":
        kept = (ratio >= icepop_low) & (ratio <= icepop_high)
        return Correction(old, torch.where(kept, ratio, torch.zeros_like(ratio)), kept)
    return Correction(old, ratio, everything)


def lag_mask(versions: Tensor, step: int, max_policy_lag: int) -> Tensor:
    """Which tokens may be trained at `step`: step - version <= max_policy_lag.

    versions int [T], the weight version that sampled each token. A token that is masked
    for its lag leaves numerator and denominator (unlike one that a correction masks).
    """
    allowed: Tensor = (step - versions) <= max_policy_lag
    return allowed
