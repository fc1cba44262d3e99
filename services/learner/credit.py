"""The advantages of a step's groups, by the job's `algorithm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway.errors import InvalidSpec
from headway.jobspec import AlgorithmSpec
from headway.rl import advantages, registry
from headway.rl.registry import Advantage
from headway.rl.returns import (
    discounted_returns,
    outcome_rewards,
    unbiased_variance,
    whitened,
)
from services.learner.batch import Credit, Labelled

Sum = Callable[[Sequence[float]], list[float]]
"""Adds numbers up over all ranks."""
Costs = Sequence[Sequence[Tensor]]
"""What is taken off the reward of each token: groups x completions of float64 [tokens]."""

_OWN: dict[str, Advantage] = {
    "dr_grpo": Advantage(lambda r, ok, _: advantages.dr_grpo(r, ok)),
    "rloo": Advantage(lambda r, ok, _: advantages.rloo(r, ok)),
    "opo": Advantage(advantages.opo),
    "grpo_passk": Advantage(lambda r, ok, _: advantages.grpo_passk(r, ok)),
    "reinforce_plus_plus_baseline": Advantage(
        lambda r, ok, _: advantages.dr_grpo(r, ok), whiten=True
    ),
}


def credit(
    labelled: Sequence[Labelled], algorithm: AlgorithmSpec, add_up: Sum, costs: Costs | None = None
) -> list[Credit]:
    """The advantages of a rank's groups, all mini-batches of the step.

    `add_up` is a collective: whitening is over the unmasked tokens of all ranks. `costs` come
    off the rewards: off each token's for reinforce_plus_plus, their sum off a
    completion's otherwise.
    """
    if algorithm.adv_estimator == "reinforce_plus_plus":
        return _returns(labelled, algorithm, add_up, costs)
    how = estimator(algorithm)
    values = []
    for i, item in enumerate(labelled):
        rewards = item.rewards
        if costs is not None:
            off = torch.stack([cost.sum() for cost in costs[i]])
            rewards = torch.where(item.graded, rewards - off, rewards)
        found = how.of(rewards[None], item.graded[None], item.lengths()[None])
        if found.shape != (1, len(rewards)):
            raise InvalidSpec(
                f"algorithm.adv_estimator {algorithm.adv_estimator} gives {tuple(found.shape)} for"
                f" rewards of {(1, len(rewards))}: one number a completion is wanted"
            )
        values.append(found[0].double())
    if how.whiten:
        weights = [torch.where(g.graded, g.lengths(), 0).double() for g in labelled]
        mean, variance = _moments(values, weights, add_up)
        values = [
            torch.where(g.graded, whitened(v, mean, variance), torch.zeros_like(v))
            for g, v in zip(labelled, values, strict=True)
        ]
    return [Credit(value) for value in values]


def estimator(algorithm: AlgorithmSpec) -> Advantage:
    """How completions are compared. KeyError: nobody registered the name."""
    name = algorithm.adv_estimator
    if name == "grpo":
        norm = algorithm.norm_adv_by_std_in_grpo
        return Advantage(lambda r, ok, _: advantages.grpo(r, ok, norm_by_std=norm))
    return _OWN[name] if name in _OWN else registry.advantages.get(name)


def _returns(
    labelled: Sequence[Labelled], algorithm: AlgorithmSpec, add_up: Sum, costs: Costs | None
) -> list[Credit]:
    """Discounted returns of every token, whitened over the batch's."""
    masks = [mask for g in labelled for mask in g.masks]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    outcomes = torch.cat([g.rewards for g in labelled])
    rewards = outcome_rewards(outcomes, mask)
    if costs is not None:
        flat = [cost for group in costs for cost in group]
        rewards = rewards - torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
    returns = discounted_returns(rewards, mask, gamma=algorithm.gamma)
    mean, variance = _moments([returns], [mask.double()], add_up)
    values = torch.where(mask, whitened(returns, mean, variance), torch.zeros_like(returns))
    means = values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    made, at = [], 0
    for group in labelled:
        rows = range(at, at + len(group.masks))
        tokens = tuple(values[r, : len(masks[r])] for r in rows)
        at += len(group.masks)
        # gmpo wants one advantage a completion
        whole = algorithm.policy_loss == "gmpo"
        made.append(Credit(means[rows.start : rows.stop], None if whole else tokens))
    return made


def _moments(
    values: Sequence[Tensor], weights: Sequence[Tensor], add_up: Sum
) -> tuple[float, float]:
    """Mean and unbiased variance of weighted values over all ranks."""

    def total(of: Callable[[Tensor], Tensor]) -> float:
        parts = [w * of(v) for v, w in zip(values, weights, strict=True)]
        # a value without weight does not count, not even as 0 * nan
        kept = [
            torch.where(w > 0, p, torch.zeros_like(p)) for p, w in zip(parts, weights, strict=True)
        ]
        return sum(float(k.sum()) for k in kept)

    count, added = add_up([total(torch.ones_like), total(lambda v: v)])
    mean = added / max(count, 1.0)
    (square,) = add_up([total(lambda v: (v - mean).square())])
    return mean, unbiased_variance(square, count)
