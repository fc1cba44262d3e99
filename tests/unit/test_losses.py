"""Clipped policy loss, aggregation, learning rates: values and gradients by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.rl.aggregate import aggregate
from headway.rl.losses import clamped_log_ratio, ppo_clip
from headway.rl.lr import learning_rate


def run(ratio: float, advantage: float, **kw: float | None) -> tuple[float, float, bool, bool]:
    """Loss, gradient by log π, clipped, clipped low of one token with that ratio."""
    lp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    out = ppo_clip(lp, torch.zeros(1), torch.tensor([advantage]), **kw)
    out.loss.sum().backward()
    assert lp.grad is not None
    return float(out.loss.detach()), float(lp.grad), bool(out.clipped), bool(out.clipped_low)


def test_on_policy_gradient_is_minus_advantage():
    assert run(1.0, 2.0) == (-2.0, -2.0, False, False)
    assert run(1.0, -2.0) == (2.0, 2.0, False, False)


def test_inside_the_clip():
    assert run(1.1, 2.0) == pytest.approx((-2.2, -2.2, False, False))


def test_clip_bounds_by_the_sign_of_the_advantage():
    assert run(1.5, 2.0) == pytest.approx((-2.4, 0.0, True, False))  # 1.2 A, no gradient
    assert run(0.5, 2.0) == pytest.approx((-1.0, -1.0, False, False))  # min takes 0.5 A
    assert run(0.5, -2.0) == pytest.approx((1.6, 0.0, True, False))  # 0.8 · 2
    assert run(1.5, -2.0) == pytest.approx((3.0, 3.0, False, False))  # not bounded above


def test_clip_higher():
    assert run(1.25, 1.0, clip_high=0.28) == pytest.approx((-1.25, -1.25, False, False))
    assert run(1.25, 1.0, clip_high=0.2)[1] == 0.0


def test_dual_clip_bounds_a_negative_advantage():
    assert run(5.0, -2.0) == pytest.approx((6.0, 0.0, False, True))  # 3 · 2
    assert run(5.0, -2.0, dual_clip=None) == pytest.approx((10.0, 10.0, False, False))
    assert run(5.0, 2.0) == pytest.approx((-2.4, 0.0, True, False))  # only for A < 0


def test_log_ratio_clamps_and_has_no_gradient_beyond():
    lp = torch.tensor([45.0, -45.0, 1.0], requires_grad=True)
    ratio = clamped_log_ratio(lp, torch.zeros(3))
    ratio.sum().backward()
    assert ratio.tolist() == [20.0, -20.0, 1.0]
    assert lp.grad is not None and lp.grad.tolist() == [0.0, 0.0, 1.0]


def mean_and_gradient(values: Tensor, mask: Tensor, count: int) -> tuple[float, list[float]]:
    leaf = values.clone().requires_grad_(True)
    out = aggregate(leaf, mask, None, max(count, 1))
    out.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return float(out.detach()), leaf.grad.tolist()


def test_token_mean_with_holes():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    mask = torch.tensor([True, False, True, False])
    assert mean_and_gradient(values, mask, 2) == (2.5, [0.5, 0.0, 0.5, 0.0])


def test_token_mean_of_parts_adds_up():
    values, mask = torch.arange(6.0), torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool)
    parts = sum(float(aggregate(values[i : i + 2], mask[i : i + 2], None, 4)) for i in (0, 2, 4))
    assert parts == float(aggregate(values, mask, None, 4)) == (0 + 1 + 3 + 5) / 4


def test_masked_fillers_do_not_change_the_mean_s059():
    kept = torch.tensor([1.0, 3.0])
    fillers = torch.tensor([float("nan"), float("inf")])
    mask = torch.tensor([True, True, False, False])
    alone = mean_and_gradient(kept, mask[:2], 2)
    padded = mean_and_gradient(torch.cat([kept, fillers]), mask, 2)
    assert padded[0] == alone[0] == 2.0
    assert padded[1] == [*alone[1], 0.0, 0.0]


def test_wholly_masked_is_zero_not_nan():
    nothing = torch.zeros(3, dtype=torch.bool)
    assert mean_and_gradient(torch.ones(3), nothing, 0) == (0.0, [0.0] * 3)


def rates(kind: str, warmup: int) -> list[float]:
    return [
        learning_rate(s, peak=8.0, kind=kind, warmup_steps=warmup, total_steps=6)  # type: ignore[arg-type]
        for s in range(6)
    ]


def test_learning_rates():
    assert rates("constant", 0) == [8.0] * 6
    assert rates("constant", 4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates("linear", 2) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]
    half = 0.5 * (1 + math.cos(math.pi / 4))
    assert rates("cosine", 2) == pytest.approx([4.0, 8.0, 8.0, 8 * half, 4.0, 8 * (1 - half)])


def test_warmup_longer_than_the_job_never_divides_by_zero():
    assert learning_rate(9, peak=1.0, kind="cosine", warmup_steps=5, total_steps=5) == 0.0
