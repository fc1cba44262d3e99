"""Distance from a reference policy: estimates a token, and the coefficient's controller."""

from __future__ import annotations

from torch import Tensor

from headway.rl.losses import clamped_log_ratio
from headway.rl.names import KlForm

K3_CLAMP = 10.0
CONTROLLER_CLIP = 0.2


def kl(form: KlForm, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """An estimate of KL(π ‖ π_ref) from tokens that π sampled; any shape.

    With x = log π - log π_ref, clamped to ±20 (no gradient beyond):

    - `k1`: x. Its expected gradient as a loss is zero: use it in the reward.
    - `k2`: x² / 2 (verl: `mse`). - `abs`: |x|.
    - `k3` (verl: `low_var_kl`): exp(-x) - 1 + x, clamped to ±10 (no gradient beyond).

    Source: Schulman, "Approximating KL divergence", 2020. Clamps as in verl, which leaves x
    itself alone in k1, k2 and abs.
    """
    x = clamped_log_ratio(logprobs, ref_logprobs)
    if form == "k1":
        return x
    if form == "k2":
        return 0.5 * x.square()
    if form == "abs":
        return x.abs()
    return ((-x).exp() - 1 + x).clamp(-K3_CLAMP, K3_CLAMP)


def adapted(
    coefficient: float, current: float, *, target: float, horizon: int, num_sequences: int
) -> float:
    """The coefficient of the next step, from this step's KL (mean over sequences of token means).

    coefficient · (1 + clip(current/target - 1, ±0.2) · num_sequences / horizon).
    Source: Ziegler et al., arXiv:1909.08593, section 2.2, as in verl and TRL.
    """
    error = min(max(current / target - 1, -CONTROLLER_CLIP), CONTROLLER_CLIP)
    return coefficient * (1 + error * num_sequences / horizon)
