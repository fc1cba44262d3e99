"""Policy and value losses, a value per token. Aggregation is `aggregate`'s business.

All tensors are [T]; masks are applied by who aggregates. π is being trained, π_old is the
proximal policy; `old_logprobs` and `advantages` carry no gradient. r = exp(log π - log π_old)
with the log-ratio clamped to ±20 (no gradient beyond). Where the advantage is zero, so
is the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_CLAMP = 20.0
GSPO_LOG_CLAMP = 10.0


def clamped_log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log p - log q of tokens, clamped to ±20; the gradient beyond is zero. Any shape.

    Without the clamp one log-ratio near 45 makes a loss 1e10 times larger.
    """
    return (numerator - denominator).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss per token and what the clip did to it."""

    loss: Tensor  # [T], has the gradient
    clipped: Tensor  # bool [T]: the clip took the token's gradient (cispo: bounded its weight)
    clipped_low: Tensor  # bool [T]: the dual clip bounded it (A < 0)

    @staticmethod
    def unclipped(loss: Tensor) -> PolicyLoss:
        """A loss that no clip touched."""
        no = torch.zeros_like(loss, dtype=torch.bool)
        return PolicyLoss(loss, no, no)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> PolicyLoss:
    """-min(rA, clip(r, 1 - low, 1 + high) A). verl: `vanilla`.

    With `dual_clip` c, a token with A < 0 loses at most -cA. A token at a clip bound has no
    gradient. Sources: PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729, eq. 5;
    clip-higher, DAPO, arXiv:2503.14476, eq. 10.
    """
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    clipped_low = torch.zeros_like(clipped)
    if dual_clip is not None:
        limit = -advantages * dual_clip
        clipped_low = (advantages < 0) & (loss > limit)
        loss = torch.where(advantages < 0, torch.minimum(loss, limit), loss)
    return PolicyLoss(loss, clipped, clipped_low)


def gspo(
    logprobs: Tensor,
    sequence_log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """-min(sA, clip(s, 1 - low, 1 + high) A) with the ratio s of the whole sequence.

    sequence_log_ratio: the mean of log π - log π_old over the unmasked tokens of the token's
    sequence, without gradient and without a clamp on single tokens. The gradient goes straight
    through: log s + log π - sg(log π), at most 10 (no gradient beyond).
    Source: GSPO, arXiv:2507.18071, eq. 7, and its token form, eq. 13 and 14; clamp and bounds
    as in verl. Its mean is `seq-mean-token-mean`.
    """
    through = logprobs - logprobs.detach() + sequence_log_ratio
    ratio = through.clamp(max=GSPO_LOG_CLAMP).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded > plain
    return PolicyLoss(torch.maximum(plain, bounded), clipped, torch.zeros_like(clipped))


def gmpo_log_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, Tensor]:
    """log r of each token, bounded to [-low, high] on the side that the advantage would push.

    Returns the log-ratios (with gradient where not bounded) and which were bounded. The
    bounds are on the log-ratio, e^-0.4 and e^0.4 in the paper.
    """
    plain = clamped_log_ratio(logprobs, old_logprobs)
    sign = advantages.sign()
    bounded = plain.clamp(-clip_low, clip_high)
    clipped = sign * bounded < sign * plain
    return torch.where(clipped, bounded, plain), clipped


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    sequence_log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> PolicyLoss:
    """-A · exp(mean_t log r_t), the geometric mean of the sequence's bounded ratios.

    sequence_log_ratio: the mean over the token's sequence of `gmpo_log_ratio`, without
    gradient; advantages: one value a sequence. A token's loss is -A s (1 + c - sg(c)) with
    c its own bounded log-ratio: their mean over the sequence has the value -A s and exactly
    its gradient. Its mean is `seq-mean-token-mean`, over non-empty sequences (verl's
    `geo_mean` counts empty ones too).
    Source: GMPO, arXiv:2507.20673, algorithm 1.
    """
    own, clipped = gmpo_log_ratio(
        logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high
    )
    loss = -advantages * sequence_log_ratio.exp() * (1 + own - own.detach())
    return PolicyLoss(loss, clipped, torch.zeros_like(clipped))


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """-sg(clip(r, 1 - low, 1 + high)) · A · log π: every token keeps its gradient.

    Bounds are relative to 1, as in verl; TRL's `epsilon_high` is the absolute upper bound.
    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.
    """
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = weight != ratio
    return PolicyLoss(-weight * advantages * logprobs, clipped, torch.zeros_like(clipped))


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLoss:
    """-σ(τ (r - 1)) · 4/τ · A with τ = tau_pos where A > 0, else tau_neg: a soft clip.

    At r = 1 the gradient by log π is -A. Its mean is `seq-mean-token-mean`.
    Source: SAPO, arXiv:2511.20347, eq. 5 and 6.
    """
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return PolicyLoss.unclipped(-torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages)


def reinforce(logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """-A · log π; the correction's weight comes on top.

    Sources: Williams, 1992; `gpg` is the same loss (GPG, arXiv:2504.02546).
    """
    return PolicyLoss.unclipped(-advantages * logprobs)


def value(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.5
) -> tuple[Tensor, Tensor]:
    """0.5 · max((V - R)², (clip(V, V_old ± clip) - R)²), and which were clipped (bool [T]).

    Sources: PPO2 of OpenAI baselines; Huang et al., "The 37 implementation details of PPO",
    detail 9. The clip of 0.5 is verl's `cliprange_value`.
    """
    near = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, bounded), bounded > plain
