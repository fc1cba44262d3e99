"""One update's passes of the critic: tensors in, values, gradients and sums out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.rl.aggregate import aggregate
from headway.rl.losses import value
from headway.rl.packing import Row
from services.learner.batch import Batch
from services.learner.critic import Critic
from services.learner.model import DeviceRow
from services.learner.sharding import last_backward
from services.learner.step import dummy_row, padded

SUMS = ("tokens", "loss", "clipped", "values")


@dataclass(slots=True)
class ValueMini:
    """One rank's share of a mini-batch of the critic. T: tokens of all its completions."""

    first: int  # place of its first group among the rank's groups of the step
    batch: Batch
    rows: list[Row]
    mask: Tensor  # bool [T]
    weights: Tensor | None  # [T] of tokens in the mean; None: all 1
    divisor: float  # the mean's denominator, over all ranks
    num_rows: int  # passes that every rank makes
    old_values: Tensor  # [T] when the step started
    returns: Tensor  # [T] what the values are to become


def foresee(critic: Critic, mini: ValueMini, device: torch.device) -> Tensor:
    """The present values of a share's tokens, float32 [T]; no gradient."""
    values = torch.zeros(len(mini.mask), device=device)
    with torch.no_grad():
        for row in padded(mini.rows, mini.num_rows):
            placed = DeviceRow.of(row or dummy_row(), device)
            _, found = critic(placed, _nothing)
            if row is not None:
                values[placed.flat] = found
    return values


def value_backward(
    critic: Critic, mini: ValueMini, clip: float | None, device: torch.device
) -> dict[str, float]:
    """Adds a share's gradients to the critic's; this rank's part of `SUMS`."""
    sums = dict.fromkeys(SUMS, 0.0)
    for i, row in enumerate(padded(mini.rows, mini.num_rows)):
        placed = DeviceRow.of(row or dummy_row(), device)
        last_backward(critic, i == mini.num_rows - 1, device)
        if row is None:
            critic(placed, _nothing)[0].backward()
            continue
        loss_of = _RowLoss(mini, placed.flat, math.inf if clip is None else clip, sums)
        loss, _ = critic(placed, loss_of)
        sums["loss"] += float(loss.detach())
        loss.backward()
    return sums


class _RowLoss:
    """The value loss of one row's tokens."""

    def __init__(self, mini: ValueMini, flat: Tensor, clip: float, sums: dict[str, float]) -> None:
        self.mini, self.flat, self.clip, self.sums = mini, flat, clip, sums

    def __call__(self, values: Tensor) -> Tensor:
        mini, flat = self.mini, self.flat
        mask = mini.mask[flat]
        loss, clipped = value(values, mini.old_values[flat], mini.returns[flat], clip=self.clip)
        self.sums["tokens"] += float(mask.sum())
        self.sums["clipped"] += float(clipped[mask].sum())
        self.sums["values"] += float(values.detach()[mask].double().sum())
        weights = None if mini.weights is None else mini.weights[flat]
        return aggregate(loss, mask, weights, mini.divisor)


def _nothing(values: Tensor) -> Tensor:
    return values.sum() * 0.0
