"""Off-policy corrections and the health numbers that go with them, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.rl import metrics
from headway.rl.aggregate import aggregate
from headway.rl.corrections import Kind, correct, lag_mask
from headway.rl.losses import ppo_clip

# w = π_old / μ of four tokens
W = [0.25, 1.0, 3.0, 8.0]
OLD = torch.full((4,), math.log(0.5), dtype=torch.float64)
MU = OLD - torch.tensor(W, dtype=torch.float64).log()


def gradient(kind: Kind, advantages: list[float]) -> list[float]:
    """d loss / d log π of each token at π = π_old, before the mean."""
    lp = OLD.clone().requires_grad_(True)
    c = correct(kind, lp, MU)
    loss = ppo_clip(lp, c.proximal, torch.tensor(advantages, dtype=torch.float64))
    (c.weights * loss.loss).sum().backward()
    assert lp.grad is not None
    return lp.grad.tolist()


def test_none_clips_on_the_sampler():
    # r = w: A > 0 clips above 1.2; 0.25 keeps its gradient r A
    assert gradient("none", [1.0] * 4) == pytest.approx([-0.25, -1.0, 0.0, 0.0])
    # A < 0: clips below 0.8, and the dual clip bounds 8 (and 3, at its very limit, is not)
    assert gradient("none", [-1.0] * 4)[:2] == pytest.approx([0.0, 1.0])
    assert gradient("none", [-1.0] * 4)[3] == 0.0


def test_tis_truncates_the_weight():
    assert gradient("tis", [1.0] * 4) == pytest.approx([-0.25, -1.0, -2.0, -2.0])


def test_icepop_masks_outside_the_bounds():
    assert gradient("icepop", [1.0] * 4) == pytest.approx([0.0, -1.0, -3.0, 0.0])
    assert correct("icepop", OLD, MU).kept.tolist() == [False, True, True, False]


def test_decoupled_weighs_untruncated():
    assert gradient("decoupled", [1.0] * 4) == pytest.approx([-0.25, -1.0, -3.0, -8.0])


def test_decoupled_clips_on_the_proximal_policy():
    # u = π/π_old = 1.5, w = 3: loss -3 · 1.2, no gradient; with A = -1: 3 · 1.5
    lp = (OLD + math.log(1.5)).requires_grad_(True)
    c = correct("decoupled", OLD, MU)
    plus = c.weights * ppo_clip(lp, c.proximal, torch.ones(4)).loss
    minus = c.weights * ppo_clip(lp, c.proximal, -torch.ones(4)).loss
    assert float(plus[2].detach()) == pytest.approx(-3.6)
    assert float(minus[2].detach()) == pytest.approx(4.5)


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_(True)
    for kind in ("none", "tis", "icepop", "decoupled"):
        c = correct(kind, old, MU)  # type: ignore[arg-type]
        assert not c.weights.requires_grad and not c.proximal.requires_grad


def test_log_ratio_of_45_is_clamped():
    c = correct("decoupled", torch.tensor([-1.0]), torch.tensor([-46.0]))
    assert c.weights.tolist() == pytest.approx([math.exp(20.0)])


def test_a_correction_mask_keeps_the_denominator():
    c = correct("icepop", OLD, MU)
    values = c.weights * torch.ones(4, dtype=torch.float64)
    mean = aggregate(values, torch.ones(4, dtype=torch.bool), None, 4)
    assert float(mean) == pytest.approx((1.0 + 3.0) / 4)  # not / 2


def test_lag_mask_bound_is_inclusive_s003():
    assert lag_mask(torch.tensor([2, 3, 4, 5]), 5, 2).tolist() == [False, True, True, True]
    assert lag_mask(torch.tensor([4, 5]), 5, 0).tolist() == [False, True]


def sums(mask: Tensor) -> dict[str, float]:
    c = correct("icepop", OLD, MU)
    found = metrics.token_sums(OLD + 0.1, OLD, MU, c.kept, mask)
    found |= metrics.sequence_sums(OLD, MU, mask, torch.tensor([0, 0, 2, 2]), 3)
    return found | {"entropy": 1.0, "clipped": 1.0, "clipped_low": 0.0, "loss": 0.0}


def test_health_numbers():
    row = metrics.summarise(sums(torch.ones(4, dtype=torch.bool)))
    logs = [math.log(w) for w in W]
    assert row["rollout_corr/kl"] == pytest.approx(-sum(logs) / 4)
    k3 = [w - 1 - log for w, log in zip(W, logs, strict=True)]
    assert row["rollout_corr/k3_kl"] == pytest.approx(sum(k3) / 4)
    square = sum(w * w for w in W)
    assert row["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(sum(W) ** 2 / 4 / square)
    assert row["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert row["actor/ppo_kl"] == pytest.approx(-0.1)
    # perplexity ratio of the two completions: exp(-mean log w); completion 1 is empty
    first, second = (math.exp(-(logs[i] + logs[i + 1]) / 2) for i in (0, 2))
    assert row["rollout_corr/ppl_ratio"] == pytest.approx((first + second) / 2)
    diffs = [abs(0.5 - 0.5 / w) for w in W]
    assert row["training/rollout_probs_diff_mean"] == pytest.approx(sum(diffs) / 4)
    everything = torch.ones(4, dtype=torch.bool)
    assert metrics.probs_diff_max(OLD, MU, everything) == pytest.approx(max(diffs))


def test_health_numbers_leave_masked_tokens_out():
    mask = torch.tensor([False, True, False, False])
    row = metrics.summarise(sums(mask))
    assert row["rollout_corr/kl"] == 0.0
    assert row["rollout_corr/rollout_is_eff_sample_size"] == 1.0
    assert row["rollout_corr/ppl_ratio"] == pytest.approx(1.0)
    assert metrics.probs_diff_max(OLD, MU, mask) == 0.0


def test_health_numbers_of_nothing_are_finite():
    row = metrics.summarise(dict.fromkeys(metrics.SUMS, 0.0))
    assert all(math.isfinite(value) for value in row.values())
    assert metrics.probs_diff_max(OLD, MU, torch.zeros(4, dtype=torch.bool)) == 0.0
