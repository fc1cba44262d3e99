"""From a loss per token to one number.

Every mode is Σ_t weight_t · loss_t / denominator with global denominators, so that the
parts of a batch, cut into rows, micro-batches and ranks in any way, add up to the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.rl.names import Aggregation
from headway.rl.sequences import Sequences


@dataclass(frozen=True, slots=True)
class Counts:
    """What a whole mini-batch holds, over all its rows and ranks."""

    tokens: int  # unmasked response tokens
    sequences: int  # completions with at least one of them


def denominator(mode: Aggregation, counts: Counts, scale_factor: int | None = None) -> float:
    """What the sum over all tokens is divided by; at least 1.

    - `token-mean`: response tokens. DAPO, arXiv:2503.14476, eq. 8.
    - `token-sum`: 1.
    - `seq-mean-…`: non-empty sequences, as in verl. (TRL divides by all of them: one empty
      row in 16 shifts the loss by 6 %.)
    - `seq-mean-token-sum-norm`: that times the constant `scale_factor`, which the user
      sets; never the padded width. Dr. GRPO, arXiv:2503.20783, section 3.2.
    """
    if mode == "token-mean":
        return max(counts.tokens, 1)
    if mode == "token-sum":
        return 1
    if mode == "seq-mean-token-sum-norm":
        if scale_factor is None:
            raise ValueError("seq-mean-token-sum-norm needs a scale factor")
        return max(counts.sequences, 1) * scale_factor
    return max(counts.sequences, 1)


def token_weights(mode: Aggregation, sequences: Sequences) -> Tensor | None:
    """The weight of each token before the division, float32 [T]; None where all are 1.

    `seq-mean-token-mean` (GRPO's paper, arXiv:2402.03300, eq. 3) weighs a token by
    1 / unmasked tokens of its sequence.
    """
    if mode != "seq-mean-token-mean":
        return None
    return 1.0 / sequences.spread(sequences.lengths().clamp(min=1)).float()


def aggregate(values: Tensor, mask: Tensor, weights: Tensor | None, denominator: float) -> Tensor:
    """Σ weights · values over the mask, divided; values [T] of any part of the batch.

    Masked values may be non-finite.
    """
    kept = torch.where(mask, values, torch.zeros_like(values))
    return (kept if weights is None else kept * weights).sum() / denominator
