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
    gae,
    outcome_rewards,
    unbiased_variance,
    whitened,
)
from services.learner.batch import Credit, Labelled

Sum = Callable[[Sequence[float]], list[float]]
"""Adds numbers up over all ranks."""
Table = Sequence[Sequence[Tensor]]
"""A number of each token: groups x completions of float64 [tokens]."""
Costs = Table
"""What is taken off the reward of each token."""

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
    totals = [item.rewards for item in labelled]
    if costs is not None:
        off = [torch.stack([cost.sum() for cost in group]) for group in costs]
        totals = [
            torch.where(g.graded, r - o, r) for g, r, o in zip(labelled, totals, off, strict=True)
        ]
    if algorithm.greedy_baseline:
        return [Credit(_above_greedy(g, r)) for g, r in zip(labelled, totals, strict=True)]
    how = estimator(algorithm)
    values = []
    for item, rewards in zip(labelled, totals, strict=True):
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


def _above_greedy(item: Labelled, rewards: Tensor) -> Tensor:
    """`remax` of one group, float64 [n]. InvalidSpec: no greedy completion was sampled."""
    if item.baseline is None:
        raise InvalidSpec(
            f"algorithm.adv_estimator remax: ticket {item.group.ticket.ticket_id} was sampled"
            " without the greedy completion that it compares with"
        )
    greedy = torch.tensor([item.baseline], dtype=torch.float64)
    return advantages.remax(rewards[None], item.graded[None], greedy)[0]


def estimator(algorithm: AlgorithmSpec) -> Advantage:
    """How completions are compared. KeyError: nobody registered the name."""
    name = algorithm.adv_estimator
    if name == "grpo":
        norm = algorithm.norm_adv_by_std_in_grpo
        return Advantage(lambda r, ok, _: advantages.grpo(r, ok, norm_by_std=norm))
    return _OWN[name] if name in _OWN else registry.advantages.get(name)


def gae_credit(
    labelled: Sequence[Labelled],
    values: Table,
    algorithm: AlgorithmSpec,
    add_up: Sum,
    costs: Costs | None = None,
) -> tuple[list[Credit], list[list[Tensor]]]:
    """PPO's advantages of a rank's groups, whitened as in `credit`, and the critic's targets.

    `values` are the critic's before the step; targets (advantage before whitening + value) have
    their form: groups x completions of float64 [tokens], zero at masked tokens.
    """
    rewards, mask = _token_rewards(labelled, costs)
    advantages, targets = gae(
        rewards, _padded(values), mask, gamma=algorithm.gamma, lam=algorithm.lam
    )
    return _of_tokens(labelled, advantages, mask, algorithm, add_up), _by_group(labelled, targets)


def _returns(
    labelled: Sequence[Labelled], algorithm: AlgorithmSpec, add_up: Sum, costs: Costs | None
) -> list[Credit]:
    """Discounted returns of every token, whitened over the batch's."""
    rewards, mask = _token_rewards(labelled, costs)
    returns = discounted_returns(rewards, mask, gamma=algorithm.gamma)
    return _of_tokens(labelled, returns, mask, algorithm, add_up)


def _token_rewards(labelled: Sequence[Labelled], costs: Costs | None) -> tuple[Tensor, Tensor]:
    """Each token's reward, and which tokens there are: rows [N, T], a completion each."""
    mask = _padded([g.masks for g in labelled])
    rewards = outcome_rewards(torch.cat([g.rewards for g in labelled]), mask)
    return rewards if costs is None else rewards - _padded(costs), mask


def _of_tokens(
    labelled: Sequence[Labelled],
    values: Tensor,
    mask: Tensor,
    algorithm: AlgorithmSpec,
    add_up: Sum,
) -> list[Credit]:
    """Advantages from values [N, T] of tokens, whitened over all ranks' tokens."""
    mean, variance = _moments([values], [mask.double()], add_up)
    values = torch.where(mask, whitened(values, mean, variance), torch.zeros_like(values))
    means = values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    # gmpo wants one advantage a completion
    whole = algorithm.policy_loss == "gmpo"
    parts = torch.split(means, [len(g.masks) for g in labelled])
    tokens = _by_group(labelled, values)
    return [
        Credit(part, None if whole else tuple(row)) for part, row in zip(parts, tokens, strict=True)
    ]


def _padded(table: Table) -> Tensor:
    """Rows [N, T] of all completions of all groups."""
    rows = [row for group in table for row in group]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _by_group(labelled: Sequence[Labelled], values: Tensor) -> list[list[Tensor]]:
    """The rows of values [N, T], each as long as its completion, by their groups."""
    rows = iter(values)
    return [[next(rows)[: len(mask)] for mask in group.masks] for group in labelled]


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
