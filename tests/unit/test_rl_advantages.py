"""Advantages, returns and whitening: hand-worked tables and a second implementation."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from headway.rl import advantages as adv
from headway.rl.returns import (
    discounted_returns,
    gae,
    outcome_rewards,
    unbiased_variance,
    whitened,
)
from headway.rl.shaping import overlong_penalty
from tests.support import rl_reference as ref

F64 = torch.float64
OURS = {
    "grpo": lambda r, ok, n: adv.grpo(r, ok),
    "dr_grpo": lambda r, ok, n: adv.dr_grpo(r, ok),
    "rloo": lambda r, ok, n: adv.rloo(r, ok),
    "opo": adv.opo,
    "grpo_passk": lambda r, ok, n: adv.grpo_passk(r, ok),
}


def tensors(rewards: list[list[float | None]]) -> tuple[Tensor, Tensor]:
    """Rewards with a number that must not matter where there is none, and who is graded."""
    r = torch.tensor([[777.0 if x is None else x for x in row] for row in rewards], dtype=F64)
    return r, torch.tensor([[x is not None for x in row] for row in rewards])


def one(name: str, rewards: list[float | None], lengths: list[int]) -> list[float]:
    r, ok = tensors([rewards])
    found: list[float] = OURS[name](r, ok, torch.tensor([lengths]))[0].tolist()
    return found


@pytest.mark.parametrize(
    ("name", "rewards", "lengths", "expected"),
    [
        ("dr_grpo", [0, 0, 0, 1], [1, 1, 1, 1], [-0.25, -0.25, -0.25, 0.75]),
        # 1 - (0 + 0 + 0)/3 and 0 - 1/3
        ("rloo", [0, 0, 0, 1], [1, 1, 1, 1], [-1 / 3, -1 / 3, -1 / 3, 1]),
        ("rloo", [3, 1, None], [1, 1, 1], [2, -2, 0]),
        # baseline (1*4 + 3*0) / 4 = 1
        ("opo", [4, 0], [1, 3], [3, -1]),
        ("opo", [4, 0, None], [1, 3, 50], [3, -1, 0]),
        ("opo", [4, 0], [0, 0], [4, 0]),  # nothing to train
        ("opo", [4, 0], [0, 2], [4, 0]),  # an empty answer is no baseline
        ("grpo_passk", [0.5, 2, 1.5], [1, 1, 1], [0, 0.5, 0]),
        ("grpo_passk", [2, 2, 0], [1, 1, 1], [0, 0, 0]),  # a tie
        ("grpo_passk", [None, 2, 0.5], [1, 1, 1], [0, 1.5, 0]),
        ("grpo_passk", [7], [1], [0]),
    ],
)
def test_tables(name, rewards, lengths, expected):
    assert one(name, rewards, lengths) == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(OURS))
def test_nothing_to_compare_is_exactly_zero(name):
    for rewards in ([0.1] * 3, [None, 0.7, None], [None] * 3, [0.1, None, 0.1]):
        assert one(name, rewards, [2, 5, 1]) == [0.0] * 3


@pytest.mark.parametrize("name", sorted(OURS))
def test_against_the_second_implementation(name):
    rng = random.Random(name)
    for _ in range(60):
        n = rng.randint(2, 6)
        levels = [0.0, 1.0, 0.1, 0.5, -3.0, 1e6]  # ties are frequent
        rewards = [None if rng.random() < 0.2 else rng.choice(levels) for _ in range(n)]
        lengths = [rng.randint(0, 4) for _ in range(n)]
        expected = ref.group_advantages(name, rewards, lengths)
        assert one(name, rewards, lengths) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(OURS))
def test_groups_do_not_meet(name):
    r, ok = tensors([[0.0, 1.0, None], [5.0, 2.0, 2.5]])
    lengths = torch.tensor([[3, 1, 2], [2, 2, 7]])
    both = OURS[name](r, ok, lengths)
    for i in range(2):
        alone = OURS[name](r[i : i + 1], ok[i : i + 1], lengths[i : i + 1])
        assert both[i].tolist() == alone[0].tolist()


def test_remax_compares_with_the_greedy_completion():
    r, ok = tensors([[1.0, 0.0, None], [0.5, 0.5, 0.5]])
    made = adv.remax(r, ok, torch.tensor([0.25, 0.0], dtype=F64))
    assert made.tolist() == [[0.75, -0.25, 0.0], [0.5, 0.5, 0.5]]


ROWS = [[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
MASK = torch.tensor(ROWS, dtype=torch.bool)


def test_outcomes_go_to_the_last_unmasked_token():
    got = outcome_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan], dtype=F64), MASK)
    assert got[:4].tolist() == [[0, 0, 0, 1], [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 4]]
    assert math.isnan(float(got[4, 0])) and got[4, 1:].tolist() == [0, 0, 0]


def test_a_batch_without_any_token():
    nothing = torch.zeros(2, 0, dtype=torch.bool)
    rewards = outcome_rewards(torch.ones(2, dtype=F64), nothing)
    assert rewards.shape == (2, 0) == discounted_returns(rewards, nothing).shape


def test_returns_pass_over_holes():
    # gamma 1/2, outcome 8 at the end: 1 2 4 8; with a hole the second row has two steps
    rewards = outcome_rewards(torch.full((5,), 8.0, dtype=F64), MASK)
    got = discounted_returns(rewards, MASK, gamma=0.5).tolist()
    assert got == [[1, 2, 4, 8], [4, 0, 8, 0], [0] * 4, [0, 0, 0, 8], [8, 0, 0, 0]]


def test_gae_table():
    # gamma 1/2, lambda 1/2, values 4 2, reward 8 at the end:
    # deltas 0 + 1 - 4 = -3 and 8 - 2 = 6; advantages -3 + 6/4 = -1.5 and 6; returns 2.5 and 8
    rewards, values = torch.tensor([[0.0, 8.0]]), torch.tensor([[4.0, 2.0]])
    advantages, returns = gae(
        rewards, values, torch.ones(1, 2, dtype=torch.bool), gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [[-1.5, 6.0]] and returns.tolist() == [[2.5, 8.0]]


def test_returns_and_gae_against_the_second_implementation():
    rng = torch.Generator().manual_seed(0)
    for width in (0, 1, 4, 9):
        rewards, values = (torch.randn(6, width, generator=rng, dtype=F64) for _ in range(2))
        mask = torch.rand(6, width, generator=rng) < 0.6
        values[~mask] = math.nan  # nobody's business
        for gamma, lam in ((1.0, 1.0), (0.9, 0.7), (0.0, 0.5)):
            got = discounted_returns(rewards, mask, gamma=gamma)
            advantages, targets = gae(rewards, values, mask, gamma=gamma, lam=lam)
            for i in range(6):
                r, v, m = rewards[i].tolist(), values[i].tolist(), mask[i].tolist()
                assert got[i].tolist() == pytest.approx(ref.returns(r, m, gamma))
                expected = ref.gae(r, v, m, gamma, lam)
                assert advantages[i].tolist() == pytest.approx(expected)
                sums = [a + b if k else 0.0 for a, b, k in zip(expected, v, m, strict=True)]
                assert targets[i].tolist() == pytest.approx(sums)


def test_whitening_has_unbiased_variance():
    # 1 2 3: mean 2, variance 1
    assert unbiased_variance(2.0, 3) == 1.0 and unbiased_variance(5.0, 1) == 0.0
    got = whitened(torch.tensor([1.0, 2.0, 3.0], dtype=F64), 2.0, 1.0).tolist()
    assert got == pytest.approx([-1 / math.sqrt(1 + 1e-8), 0.0, 1 / math.sqrt(1 + 1e-8)])
    assert whitened(torch.tensor([4.0]), 4.0, 0.0).tolist() == [0.0]


@pytest.mark.parametrize("length", [0, 5, 6, 7, 8, 9, 10, 11, 40])
def test_overlong_penalty_of_dapo(length):
    got = float(overlong_penalty(torch.tensor(length), max_tokens=10, buffer=4))
    assert got == ref.overlong(length, 10, 4)
    half = float(overlong_penalty(torch.tensor(length), max_tokens=10, buffer=4, factor=0.5))
    assert half == 0.5 * got
