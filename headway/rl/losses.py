"""Policy losses, a value per token. Aggregation is `aggregate`'s business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_CLAMP = 20.0


def clamped_log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log p - log q of tokens, clamped to ±20; the gradient beyond is zero. Any shape.

    Without the clamp one log-ratio near 45 makes a loss 1e10 times larger.
    """
    return (numerator - denominator).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss per token and what the clip did to it."""

    loss: Tensor  # [T], has the gradient
    clipped: Tensor  # bool [T]: the clipped branch was the larger loss
    clipped_low: Tensor  # bool [T]: the dual clip bounded it (A < 0)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> PolicyLoss:
    """-min(rA, clip(r, 1 - low, 1 + high) A) with r = exp(log π - log π_old).

    All [T]; no masks here. `old_logprobs` and `advantages` carry no gradient. With
    `dual_clip` c, a token with A < 0 loses at most -cA. A token at a clip bound has no
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
