"""What is added to a grader's reward before advantages are made."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(
    lengths: Tensor, *, max_tokens: int, buffer: int, factor: float = 1.0
) -> Tensor:
    """0 up to max_tokens - buffer tokens, then linear, -factor from max_tokens on.

    lengths int, any shape; float64 of the same shape. Source: DAPO, arXiv:2503.14476, eq. 13
    (L_max, L_cache; verl: `overlong_buffer`).
    """
    beyond = (lengths - (max_tokens - buffer)).clamp(0, buffer)
    return -factor * beyond.double() / buffer
