"""What a step trains on: advantages, packed shares, and log-probs that must come first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.jobspec import JobSpec
from headway.messages import Group
from headway.rl.aggregate import Counts, denominator
from headway.rl.flops import training_flops
from headway.rl.shaping import overlong_penalty
from services.learner.batch import Batch, Credit, Labelled, label, make_batch
from services.learner.credit import Costs, credit, gae_credit
from services.learner.critic_trainer import CriticTrainer, table_of
from services.learner.model import RunsRows
from services.learner.objective import Objective, Share
from services.learner.placed import Placed
from services.learner.reward_kl import KlController, penalise
from services.learner.step import correct_whole, make_share, recompute
from services.learner.value_step import ValueMini

Stats = dict[str, float]


@dataclass(frozen=True, slots=True)
class Mini:
    """One rank's share of a mini-batch, ready for its updates."""

    share: Share
    divisor: float  # the mean's denominator, over all ranks
    num_rows: int  # passes that every rank makes


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's mini-batches in order, and what is known of them before any update."""

    minis: list[Mini]  # none in a step in which the critic alone is trained
    values: list[ValueMini]  # of the critic; none without one
    stats: Stats


class Planner:
    """Plans the steps of one rank. Every method is a collective over the ranks."""

    def __init__(
        self,
        spec: JobSpec,
        placed: Placed,
        critic: CriticTrainer | None,
        controller: KlController,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._policy, self._reference, self._critic = placed.policy, placed.reference, critic
        self._totals, self._shape = placed.totals, placed.shape
        self._controller, self._device = controller, device

    def plan(self, step: int, groups: Sequence[Group], late: frozenset[int]) -> Plan:
        """Plans the step that trains on this rank's groups. LedgerViolation as in `label`."""
        spec = self._spec
        size = spec.mini_batch_size // self._totals.world
        labelled = label(groups, step, late, spec.algorithm.max_policy_lag, self._length_penalty())
        costs, stats = self._kl_in_reward(labelled)
        credits, values, said = self._credit(labelled, costs)
        run_all = Objective(spec.algorithm, spec.actor).beyond_advantages
        shares = [
            self._share(make_batch(labelled[i : i + size], credits[i : i + size], run_all=run_all))
            for i in range(0, len(groups), size)
        ]
        stats |= said | self._batch_stats(shares)
        if step < spec.trainer.critic_warmup:
            stats["perf/model_tflop"] = 0.0
            shares = []
        if self._critic is not None:
            stats["perf/model_tflop"] += self._critic.tflop(values)
        updates = len(shares) * spec.actor.ppo_epochs
        return Plan([self._mini(share, updates) for share in shares], values, stats)

    def _credit(
        self, labelled: Sequence[Labelled], costs: Costs | None
    ) -> tuple[list[Credit], list[ValueMini], Stats]:
        """Advantages; with a critic also what it is to learn, and how well it knew it."""
        algorithm, add_up = self._spec.algorithm, self._totals.sum
        if self._critic is None:
            return credit(labelled, algorithm, add_up, costs), [], {}
        minis = self._critic.foresee(labelled)
        values = table_of(minis, labelled)
        credits, targets = gae_credit(labelled, values, algorithm, add_up, costs)
        return credits, minis, self._critic.aim(minis, targets)

    def _share(self, batch: Batch) -> Share:
        row_tokens = self._spec.actor.ppo_max_token_len_per_gpu
        return make_share(batch, self._device, row_tokens, self._spec.algorithm.loss_agg_mode)

    def _mini(self, share: Share, updates: int) -> Mini:
        batch, algorithm = share.batch, self._spec.algorithm
        tokens, sequences = self._totals.sum([float(batch.num_tokens), float(batch.num_sequences)])
        counts = Counts(int(tokens), int(sequences))
        divisor = denominator(algorithm.loss_agg_mode, counts, algorithm.loss_scale_factor)
        mini = Mini(share, divisor, self._passes(share))
        self._prepare(share, mini.num_rows, updates)
        return mini

    def _passes(self, share: Share) -> int:
        (rows,) = self._totals.max([float(len(share.rows))])
        return int(rows)

    def _logprobs(self, policy: RunsRows, share: Share, num_rows: int) -> Tensor:
        return recompute(policy, share, num_rows, self._spec.rollout.temperature, self._device)

    def _prepare(self, share: Share, num_rows: int, updates: int) -> None:
        """Log-probs and corrections that the first update of a step must have."""
        correction = self._spec.algorithm.rollout_correction
        share.on_policy = updates == 1 and correction.proximal == "recompute"
        several = updates > 1 and correction.proximal == "recompute"
        if several or correction.by_sequence:
            share.old_logprobs = self._logprobs(self._policy, share, num_rows)
        if correction.by_sequence:
            correct_whole(share, correction, self._device)
        if self._spec.actor.use_kl_loss:
            assert self._reference is not None
            share.ref_logprobs = self._logprobs(self._reference, share, num_rows)

    def _length_penalty(self) -> Callable[[Tensor], Tensor] | None:
        overlong, limit = self._spec.reward.overlong_buffer, self._spec.rollout.max_tokens
        if not overlong.enable:
            return None
        return lambda lengths: overlong_penalty(
            lengths, max_tokens=limit, buffer=overlong.len, factor=overlong.penalty_factor
        )

    def _kl_in_reward(self, labelled: Sequence[Labelled]) -> tuple[Costs | None, Stats]:
        """What a KL takes off the rewards, and the numbers of the penalised rewards."""
        algorithm = self._spec.algorithm
        if not algorithm.use_kl_in_reward:
            return None, self._reward_stats(labelled, None)
        assert self._reference is not None
        nothing = [Credit(torch.zeros_like(item.rewards)) for item in labelled]
        batch = make_batch(labelled, nothing, run_all=True)
        share = self._share(batch)
        num_rows = self._passes(share)
        old = share.rollout_logprobs
        if algorithm.rollout_correction.proximal == "recompute":
            old = self._logprobs(self._policy, share, num_rows)
        coefficient = self._controller.coefficient
        reference = self._logprobs(self._reference, share, num_rows)
        penalty = penalise(labelled, batch, algorithm.kl_penalty, coefficient, old, reference)
        added, count = self._totals.sum([penalty.kl, float(penalty.num_sequences)])
        current = added / max(count, 1.0)
        self._controller.update(current, int(count))
        return penalty.costs, {
            "actor/reward_kl_penalty": current,
            "actor/reward_kl_penalty_coeff": coefficient,
            **self._reward_stats(labelled, penalty.costs),
        }

    def _reward_stats(self, labelled: Sequence[Labelled], costs: Costs | None) -> Stats:
        """`critic/rewards` where it is not the graders' score."""
        if costs is None and not self._spec.reward.overlong_buffer.enable:
            return {}
        rewards = [item.rewards for item in labelled]
        if costs is not None:
            taken = [torch.stack([c.sum() for c in group]) for group in costs]
            rewards = [r - t for r, t in zip(rewards, taken, strict=True)]
        values = torch.cat([r[g.graded] for r, g in zip(rewards, labelled, strict=True)])
        return self._totals.spread("critic/rewards", values)

    def _batch_stats(self, shares: Sequence[Share]) -> Stats:
        batches = [share.batch for share in shares]
        rows = [row for share in shares for row in share.rows]
        sums = self._totals.sum(
            [
                float(sum(batch.num_groups for batch in batches)),
                float(sum(batch.num_flat for batch in batches)),
                float(sum(batch.num_late for batch in batches)),
                float(sum(batch.num_tokens for batch in batches)),
                float(sum(len(row.tokens) for row in rows)),
                training_flops(self._shape, rows) / 1e12,
            ]
        )
        advantages = torch.cat([batch.completion_advantages for batch in batches])
        return {
            **self._totals.spread("critic/advantages", advantages),
            "training/zero_variance_ratio": sums[1] / max(sums[0], 1.0),
            "training/late_tokens": sums[2],
            "training/num_tokens": sums[3],
            "training/packed_tokens": sums[4],
            "perf/model_tflop": sums[5] * self._spec.actor.ppo_epochs,
        }
