"""Measurements of an update, as sums that add up over rows and ranks.

Every function takes what one part of the batch holds and returns sums; `summarise`
turns the added sums into the numbers people plot. So neither micro-batches nor ranks
change a metric.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.rl.losses import clamped_log_ratio

SUMS = (
    "tokens", "loss", "entropy", "ppo_kl", "clipped", "clipped_low",
    "rollout_kl", "rollout_k3", "weight", "weight_sq", "rejected", "probs_diff",
    "sequences", "ppl_ratio", "kl_loss", "weighted_entropy",
)  # fmt: skip


def token_sums(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    kept: Tensor,
    mask: Tensor,
) -> dict[str, float]:
    """Sums over the unmasked tokens of some completions. All [T]; masks bool.

    ppo_kl is the k1 estimate of KL(π_old ‖ π), log π_old - log π. With r = log π_old -
    log μ (clamped ±20): rollout_kl is -r (k1 of KL(μ ‖ π_old)), rollout_k3 is
    exp(r) - 1 - r (Schulman, "Approximating KL divergence", 2020); weight is w = exp(r).
    probs_diff is |μ - π_old| as probabilities.
    """
    lp, old, mu = (x.detach()[mask].double() for x in (logprobs, old_logprobs, rollout_logprobs))
    r = clamped_log_ratio(old, mu)
    w = r.exp()
    return {
        "tokens": float(len(lp)),
        "ppo_kl": float(clamped_log_ratio(old, lp).sum()),
        "rollout_kl": float(-r.sum()),
        "rollout_k3": float((w - 1 - r).sum()),
        "weight": float(w.sum()),
        "weight_sq": float(w.square().sum()),
        "rejected": float((~kept[mask]).sum()),
        "probs_diff": float((old.exp() - mu.exp()).abs().sum()),
    }


def probs_diff_max(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> float:
    """The largest |μ - π_old| of an unmasked token; 0 without tokens, infinite for a NaN.

    (A maximum over ranks may drop a NaN, but not an infinity.)
    """
    diff = (old_logprobs.detach()[mask].exp() - rollout_logprobs.detach()[mask].exp()).abs()
    return float(diff.nan_to_num(nan=torch.inf).max()) if len(diff) else 0.0


def sequence_sums(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, sequence: Tensor, count: int
) -> dict[str, float]:
    """Per-completion sums. sequence int [T] in 0..count; completions without tokens do not count.

    ppl_ratio is exp(mean_t(log μ - log π_old)): perplexity of a completion under the
    learner over that under the sampler.
    """
    gap = torch.where(mask, (rollout_logprobs - old_logprobs).detach(), 0.0).double()
    total = torch.zeros(count, dtype=torch.float64, device=gap.device).index_add(0, sequence, gap)
    length = torch.zeros_like(total).index_add(0, sequence, mask.double())
    full = length > 0
    ratio = (total[full] / length[full]).clamp(-20.0, 20.0).exp()
    return {"sequences": float(full.sum()), "ppl_ratio": float(ratio.sum())}


def summarise(sums: dict[str, float]) -> dict[str, float]:
    """Added sums to the metrics people plot; means over the tokens that ran.

    rollout_is_eff_sample_size is (Σw)² / (n Σw²), 1 when sampler and learner agree.
    """
    n = max(sums["tokens"], 1.0)
    weight_sq = sums["weight_sq"]
    return {
        "actor/entropy": sums["entropy"] / n,
        "actor/ppo_kl": sums["ppo_kl"] / n,
        "actor/pg_clipfrac": sums["clipped"] / n,
        "actor/pg_clipfrac_lower": sums["clipped_low"] / n,
        "rollout_corr/kl": sums["rollout_kl"] / n,
        "rollout_corr/k3_kl": sums["rollout_k3"] / n,
        "rollout_corr/ppl_ratio": sums["ppl_ratio"] / max(sums["sequences"], 1.0),
        "rollout_corr/rollout_is_eff_sample_size": (
            sums["weight"] ** 2 / (n * weight_sq) if weight_sq else 1.0
        ),
        "rollout_corr/rollout_rs_masked_fraction": sums["rejected"] / n,
        "training/rollout_probs_diff_mean": sums["probs_diff"] / n,
    }
