"""Learning-rate schedules as functions of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, kind: Schedule, warmup_steps: int, total_steps: int
) -> float:
    """The learning rate of training step `step`, counted from 0.

    Warm-up rises linearly and reaches `peak` at its last step: step 0 has
    peak / warmup_steps, not zero, so no step is wasted. Then `constant` stays, `linear`
    falls to 0 and `cosine` follows half a cosine to 0 at `total_steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if kind == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if kind == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
