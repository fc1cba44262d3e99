"""The critic in training: its values before a step, its updates in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from headway.jobspec import JobSpec
from headway.rl.aggregate import Counts, denominator, token_weights
from headway.rl.flops import training_flops
from headway.rl.packing import pack
from headway.rl.returns import explained_variance
from headway.row_budget import row_budget
from services.learner.batch import Credit, Labelled, make_batch
from services.learner.credit import Table
from services.learner.critic import Critic, load_critic
from services.learner.masters import float32_weights
from services.learner.optimiser import Optimiser
from services.learner.totals import Totals
from services.learner.value_step import SUMS, ValueMini, foresee, value_backward

Stats = dict[str, float]


class CriticTrainer:
    """One rank's share of a job's critic. Every method is a collective over the ranks."""

    def __init__(
        self,
        path: Path,
        spec: JobSpec,
        vocabulary: int,
        totals: Totals,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Loads the body it starts from, see `load_critic`; `vocabulary` is the policy's."""
        self._spec = spec
        self._totals, self._device = totals, device
        self.critic: Critic = load_critic(
            path,
            dtype,
            totals.world,
            device,
            vocabulary=vocabulary,
            gradient_checkpointing=spec.actor.gradient_checkpointing,
        )
        self.optimiser = Optimiser(
            float32_weights(self.critic, dtype, totals.world),
            spec.critic.optim,
            total_steps=spec.trainer.total_training_steps,
            device=device,
        )

    def foresee(self, labelled: Sequence[Labelled]) -> list[ValueMini]:
        """The mini-batches of a step with the values as they are before it."""
        size = self._spec.critic_mini_batch_size // self._totals.world
        minis = [self._mini(labelled, first, size) for first in range(0, len(labelled), size)]
        for mini in minis:
            mini.old_values = foresee(self.critic, mini, self._device)
        return minis

    def _mini(self, labelled: Sequence[Labelled], first: int, size: int) -> ValueMini:
        algorithm = self._spec.algorithm
        part = labelled[first : first + size]
        nothing = [Credit(torch.zeros_like(item.rewards)) for item in part]
        batch = make_batch(part, nothing, run_all=True)
        wanted = self._spec.actor.ppo_max_token_len_per_gpu
        rows = pack(batch.samples, row_budget(wanted, on_gpu=self._device.type != "cpu"))
        tokens, sequences = self._totals.sum([float(batch.num_tokens), float(batch.num_sequences)])
        (num_rows,) = self._totals.max([float(len(rows))])
        counts = Counts(int(tokens), int(sequences))
        zeros = torch.zeros(len(batch.mask), device=self._device)
        return ValueMini(
            first=first,
            batch=batch,
            rows=rows,
            mask=batch.mask.to(self._device),
            weights=token_weights(algorithm.loss_agg_mode, batch.sequences(self._device)),
            divisor=denominator(algorithm.loss_agg_mode, counts, algorithm.loss_scale_factor),
            num_rows=int(num_rows),
            old_values=zeros,
            returns=zeros,
        )

    def aim(self, minis: Sequence[ValueMini], returns: Table) -> Stats:
        """Sets what the values are to become; says how far they are from it."""
        for mini in minis:
            parts = [returns[mini.first + i][j].float() for i, j in mini.batch.owners]
            if parts:
                mini.returns = torch.cat(parts).to(self._device)
        values = torch.cat([mini.old_values[mini.mask] for mini in minis]).double().cpu()
        aims = torch.cat([mini.returns[mini.mask] for mini in minis]).double().cpu()
        return {
            **self._totals.spread("critic/values", values),
            **self._totals.spread("critic/returns", aims),
            "critic/vf_explained_var": explained_variance(values, aims, self._totals.sum),
        }

    def tflop(self, minis: Sequence[ValueMini]) -> float:
        """Work of a step's updates on all ranks, 1e12 operations."""
        rows = [row for mini in minis for row in mini.rows]
        (total,) = self._totals.sum([training_flops(self.critic.shape, rows) / 1e12])
        return total * self._spec.critic_epochs

    def train(self, step: int, minis: Sequence[ValueMini]) -> Stats:
        """The updates of a step: epochs over the mini-batches, in the batch's order."""
        lr = self.optimiser.set_lr(step)
        rows = [self._update(mini) for _ in range(self._spec.critic_epochs) for mini in minis]
        stats = {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}
        stats["critic/skipped"] = max(row["critic/skipped"] for row in rows)
        return {**stats, "critic/lr": lr}

    def _update(self, mini: ValueMini) -> Stats:
        part = value_backward(self.critic, mini, self._spec.critic.cliprange_value, self._device)
        sums = dict(zip(SUMS, self._totals.sum([part[name] for name in SUMS]), strict=True))
        norm, applied = self.optimiser.update(sums["loss"])
        tokens = max(sums["tokens"], 1.0)
        return {
            "critic/vf_loss": sums["loss"],
            "critic/vf_clipfrac": sums["clipped"] / tokens,
            "critic/vpred_mean": sums["values"] / tokens,
            "critic/grad_norm": norm,
            "critic/skipped": 0.0 if applied else 1.0,
        }


def table_of(minis: Sequence[ValueMini], labelled: Sequence[Labelled]) -> Table:
    """The values of each completion's tokens; zeros where it did not run."""
    table = [[torch.zeros(len(m), dtype=torch.float64) for m in g.masks] for g in labelled]
    for mini in minis:
        values, at = mini.old_values.double().cpu(), 0
        for i, j in mini.batch.owners:
            length = len(table[mini.first + i][j])
            table[mini.first + i][j] = values[at : at + length]
            at += length
    return table
