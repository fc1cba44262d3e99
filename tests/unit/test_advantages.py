"""GRPO advantages, with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from headway.rl.advantages import grpo, varied


def rewards(*groups: list[float]) -> torch.Tensor:
    return torch.tensor(groups, dtype=torch.float64)


def graded(r: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(r, dtype=torch.bool)


def test_unbiased_std_and_eps():
    # mean 1, deviations -1 0 1, unbiased variance 2/2 = 1: A = ±1/(1 + 1e-6)
    r = rewards([0.0, 1.0, 2.0])
    assert grpo(r, graded(r)).tolist() == [[-1 / (1 + 1e-6), 0.0, 1 / (1 + 1e-6)]]


def test_two_groups_do_not_meet():
    # [0, 0, 0, 1]: mean 1/4, variance (3/16 + 9/16)/3 = 1/4, std 1/2
    # [0, 2, 2, 4]: mean 2, variance 8/3
    r = rewards([0.0, 0.0, 0.0, 1.0], [0.0, 2.0, 2.0, 4.0])
    a = grpo(r, graded(r))
    assert a[0].tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=4e-6)
    s = (8 / 3) ** 0.5
    assert a[1].tolist() == pytest.approx([-2 / s, 0.0, 0.0, 2 / s], abs=4e-6)


def test_without_std_is_dr_grpo():
    r = rewards([0.0, 0.0, 0.0, 1.0])
    assert grpo(r, graded(r), norm_by_std=False).tolist() == [[-0.25, -0.25, -0.25, 0.75]]


def test_equal_rewards_give_exactly_zero():
    # 0.1 is not exact in binary: a rounded mean must not become an advantage
    r = rewards([0.1, 0.1, 0.1])
    assert grpo(r, graded(r)).tolist() == [[0.0, 0.0, 0.0]]
    assert varied(r, graded(r)).tolist() == [False]


def test_ungraded_completion_leaves_the_statistics_s043():
    # an error is never a zero: the group is [0, 1] whatever stands in the third place
    r = rewards([0.0, 1.0, 7.0])
    ok = torch.tensor([[True, True, False]])
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert grpo(r, ok)[0].tolist() == pytest.approx([-half, half, 0.0])


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_survivor_of_one_has_no_gradient_s055(norm_by_std):
    r = rewards([0.7, 0.0, 0.0, 0.0])
    ok = torch.tensor([[True, False, False, False]])
    assert grpo(r, ok, norm_by_std=norm_by_std).tolist() == [[0.0] * 4]
    assert varied(r, ok).tolist() == [False]


def test_group_of_one_is_zero_not_nan_s055():
    r = rewards([3.0])
    assert grpo(r, graded(r)).tolist() == [[0.0]]


def test_nobody_graded_is_zero():
    r = rewards([1.0, 2.0])
    assert grpo(r, torch.zeros_like(r, dtype=torch.bool)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_not_hidden_s083(bad):
    r = rewards([bad, 1.0])
    assert varied(r, graded(r)).tolist() == [True]
    assert not torch.isfinite(grpo(r, graded(r))).all()


def test_a_huge_reward_stays_finite():
    r = rewards([1e38, 0.0])
    assert grpo(r, graded(r)).tolist()[0] == pytest.approx([0.5**0.5, -(0.5**0.5)])
