"""A KL penalty in the reward: what it costs each token, and its coefficient over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.jobspec import KlCtrlSpec
from headway.rl.kl import adapted, kl
from headway.rl.names import KlForm
from services.learner.batch import Batch, Labelled


@dataclass(frozen=True, slots=True)
class Penalty:
    """Costs of a rank's completions and what the controller must know of them."""

    costs: list[list[Tensor]]  # groups x completions of float64 [tokens]
    kl: float  # sum over completions of the mean KL of their tokens
    num_sequences: int


def penalise(
    labelled: Sequence[Labelled],
    batch: Batch,
    form: KlForm,
    coefficient: float,
    logprobs: Tensor,
    ref_logprobs: Tensor,
) -> Penalty:
    """coefficient · KL of every unmasked token of `batch`, which holds all that may be trained."""
    sequences = batch.sequences(logprobs.device)
    # what a mask hides may be anything
    distance = kl(form, torch.where(sequences.mask, logprobs, ref_logprobs), ref_logprobs).double()
    means = sequences.mean(distance)
    costs = [[torch.zeros(len(m), dtype=torch.float64) for m in g.masks] for g in labelled]
    at = 0
    spent = (coefficient * torch.where(sequences.mask, distance, 0.0)).cpu()
    for i, j in batch.owners:
        length = len(costs[i][j])
        costs[i][j] = spent[at : at + length]
        at += length
    return Penalty(costs, float(means.sum()), sequences.count)


class KlController:
    """The penalty's coefficient; a checkpoint holds it."""

    def __init__(self, settings: KlCtrlSpec) -> None:
        self._settings = settings
        self.state = torch.tensor(settings.kl_coef, dtype=torch.float64)

    @property
    def coefficient(self) -> float:
        """Of this step."""
        return float(self.state)

    def update(self, current: float, num_sequences: int) -> None:
        """Makes the next step's coefficient from this step's KL over all ranks."""
        if self._settings.type == "fixed" or not math.isfinite(current):
            return
        self.state.fill_(
            adapted(
                self.coefficient,
                current,
                target=self._settings.target_kl,
                horizon=self._settings.horizon,
                num_sequences=num_sequences,
            )
        )
