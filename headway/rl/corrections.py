"""Corrections for completions that another policy sampled.

μ sampled the token, π_old is the learner's policy when the step starts, π is being
trained. A correction chooses the proximal policy of the clip, a weight per token that
carries no gradient, and tokens that are rejected. Log-ratios are clamped to ±20, those of
sequences after the sum.

What is masked or rejected here leaves the numerator only: the mean keeps the count before,
so `kept` must not shrink the denominator. Sequences are those of the mask before any
rejection. A log-prob that is not a number is kept: no bound may hide it, the step is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.rl.losses import LOG_RATIO_CLAMP, clamped_log_ratio
from headway.rl.names import Correction as Kind
from headway.rl.names import Proximal, Rejection
from headway.rl.sequences import Sequences

GEOMETRIC_LOW, GEOMETRIC_HIGH = 0.99, 1.01


@dataclass(frozen=True, slots=True)
class Correction:
    """What the loss uses: loss = weights * policy_loss(π, proximal)."""

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
    proximal: Proximal | None = None,
    alpha: float = 0.5,
    sequences: Sequences | None = None,
) -> Correction:
    """The correction of each token, from w = π_old / μ. All [T], no gradient.

    - `none`: weight 1: the clip alone is trusted.
    - `tis`: weight min(w, C). Truncated importance sampling (Yao et al., 2025).
    - `icepop`: weight w where low <= w <= high, else 0 (IcePop, arXiv:2510.18855; masked
      importance sampling).
    - `decoupled`: weight w, the clip on π/π_old (arXiv:2110.00641, eq. 5; AReaL,
      arXiv:2505.24298, eq. 5).

    With `sequences`, w is that of the whole completion, exp(Σ_t log w_t): its tokens share
    one weight. `proximal` says what the clip compares with and w is made of: π_old
    (`recompute`, the default), μ itself (`bypass`, the default of `none`: w is 1), or
    `log_linear`, where `old_logprobs` are π's own, see there.
    """
    old, mu = old_logprobs.detach(), rollout_logprobs.detach()
    proximal = proximal or ("bypass" if kind == "none" else "recompute")
    if proximal == "bypass":
        old = mu
    elif proximal == "log_linear":
        old = log_linear(old, mu, alpha)
    if sequences is None:
        ratio = clamped_log_ratio(old, mu).exp()
    else:
        log_ratio = sequences.sum(old - mu).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        ratio = sequences.spread(log_ratio.exp())
    everything = torch.ones_like(ratio, dtype=torch.bool)
    if kind == "none":
        return Correction(old, torch.ones_like(ratio), everything)
    if kind == "tis":
        return Correction(old, ratio.clamp(max=tis_cap), everything)
    if kind == "icepop":
        kept = ~((ratio < icepop_low) | (ratio > icepop_high))
        return Correction(old, torch.where(kept, ratio, torch.zeros_like(ratio)), kept)
    return Correction(old, ratio, everything)


def log_linear(logprobs: Tensor, rollout_logprobs: Tensor, alpha: float) -> Tensor:
    """log π_old ≈ log μ + α (log π - log μ), without a pass of its own. All [T], no gradient.

    α 0 is μ, α 1 is π. Source: A-3PO, arXiv:2512.06547 (AReaL's `loglinear`, which takes α
    from the versions; here it is a constant).
    """
    mu = rollout_logprobs.detach()
    return mu + alpha * (logprobs.detach() - mu)


def reject(
    rule: Rejection,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    high: float,
    low: float | None = None,
    sequences: Sequences | None = None,
) -> Tensor:
    """Which tokens a rejection rule keeps, bool [T]; names and estimates as in verl.

    With x = log π_old - log μ a token, clamped to ±20: k1 is x, k2 x²/2, k3 exp(x) - 1 - x.
    `token_…` judges each token, `seq_sum_…`, `seq_mean_…` and `seq_max_…` the sum, mean and
    maximum over a completion (with `sequences`) and keep or reject it whole. k1 bounds
    are of the ratio: low <= exp(k1) <= high, and `low` is 1 / high where it is not given. k2
    and k3 have the upper bound alone. `geometric` is `seq_mean_k1`: the geometric mean of
    the completion's ratios. Bounds are inclusive.
    """
    rule = "seq_mean_k1" if rule == "geometric" else rule
    level, _, form = rule.rpartition("_")
    x = clamped_log_ratio(old_logprobs.detach(), rollout_logprobs.detach())
    estimate = {"k1": x, "k2": 0.5 * x.square(), "k3": x.exp() - 1 - x}[form]
    if level != "token":
        if sequences is None:
            raise ValueError(f"{rule} judges completions: it needs their tokens")
        over = {"seq_sum": sequences.sum, "seq_mean": sequences.mean, "seq_max": sequences.max}
        estimate = sequences.spread(over[level](estimate))
    if form != "k1":
        return ~(estimate > high)
    ratio = estimate.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    kept: Tensor = ~((ratio < (1 / high if low is None else low)) | (ratio > high))
    return kept


def lag_mask(versions: Tensor, step: int, max_policy_lag: int) -> Tensor:
    """Which tokens may be trained at `step`: step - version <= max_policy_lag.

    versions int [T], the weight version that sampled each token. A token that is masked
    for its lag leaves numerator and denominator (unlike one that a correction masks).
    """
    allowed: Tensor = (step - versions) <= max_policy_lag
    return allowed
