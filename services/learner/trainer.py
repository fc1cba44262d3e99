"""The trainer: a model, its optimiser, and what the learner's loop asks of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headway.errors import InvalidSpec
from headway.jobspec import JobSpec
from headway.messages import Group
from headway.precision import resolve_dtype
from headway.rl import metrics
from headway.weights.manifest import combined_digest, digest_of, tensor_bytes
from headway.weights.packing import Room
from services.learner.critic_trainer import CriticTrainer
from services.learner.custom import load_custom
from services.learner.fsdp import place_fsdp
from services.learner.machine import peak_flops
from services.learner.model import Policy, RunsRows
from services.learner.objective import Objective
from services.learner.optimiser import Optimiser
from services.learner.placed import Place
from services.learner.planning import Mini, Planner
from services.learner.reward_kl import KlController
from services.learner.sharding import compute_dtype, own, whole
from services.learner.step import backward, loss_stats, sums_of

Stats = dict[str, float]


class Trainer(Protocol):
    """One rank's share of a model in training. Every method is a collective over the ranks."""

    peak_flops: float  # operations a second this rank could reach; 0: not known

    def train_step(
        self, step: int, groups: Sequence[Group], late: frozenset[int] = frozenset()
    ) -> Stats:
        """Trains on this rank's groups (`batch.share` of the batch, in its order).

        `late` are ticket ids whose too old tokens are masked. The answer is the same on
        every rank, names as in docs/metrics.md, finite values only. An update whose loss
        or gradient is not finite leaves weights and optimiser as they were;
        `actor/skipped` is then 1 (also for a critic's update), otherwise 0.
        """

    def digest(self) -> str:
        """xxh3-128 of what is trained, a critic too, the same on every rank; empty: not kept.

        Equal digests are equal bits for the same number of ranks.
        """

    def weights(self) -> list[tuple[str, Tensor]]:
        """Copies of what is trained, by published name; rank 0 only, else empty.

        In the rollout dtype, on the CPU.
        """

    def state(self) -> dict[str, Any]:
        """All that a checkpoint must hold, for torch.distributed.checkpoint; live tensors."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what was loaded into `state()`."""

    def hold(self, until: Future[Any]) -> None:
        """Changes nothing of `state()` until the future is done, however it ends."""

    def export(self, path: Path) -> None:
        """Writes a Hugging Face folder in the model's own dtype (rank 0), whole or not at all."""


class ModelTrainer:
    """Trains a policy or adapters of it, wherever it lies: AdamW on float32 weights.

    Nothing here is random: the same groups give the same weights. Several ranks have a process
    group.
    """

    def __init__(
        self,
        place: Place,
        model_path: str | Path,
        spec: JobSpec,
        rank: int,
        world: int,
        device: torch.device,
        critic_path: Path | None = None,
    ) -> None:
        """Loads the model as `place` does, and a critic if the job has one.

        The critic starts from `critic_path` (None: the same). InvalidSpec when either cannot be
        trained.
        """
        load_custom(spec.algorithm)
        self._source = Path(model_path)
        self._spec = spec
        self._rank, self._world, self._device = rank, world, device
        self.compute_dtype = compute_dtype(spec.actor.compute_dtype, device)
        placed = place(self._source, spec, self.compute_dtype, rank, world, device)
        self._policy, self._totals = placed.policy, placed.totals
        self._named, self._written = placed.named, placed.written
        self._objective = Objective(spec.algorithm, spec.actor)
        self._kl_controller = KlController(spec.algorithm.kl_ctrl)
        self.critic: CriticTrainer | None = None  # open to tests
        if spec.has_critic:
            self.critic = CriticTrainer(
                critic_path or self._source,
                spec,
                placed.shape.vocab_size,
                self._totals,
                self.compute_dtype,
                device,
            )
        self._planner = Planner(spec, placed, self.critic, self._kl_controller, device)
        self._room = Room()  # for the version to be sent
        self.peak_flops = peak_flops(device, self.compute_dtype)
        self._optimiser = Optimiser(
            placed.weights,
            spec.actor.optim,
            total_steps=spec.trainer.total_training_steps,
            device=device,
        )
        self._parameters = self._optimiser.parameters
        self._optimisers = [self._optimiser]
        if self.critic is not None:
            self._optimisers.append(self.critic.optimiser)

    @property
    def policy(self) -> RunsRows:
        """The policy, for benchmarks and tests."""
        return self._policy

    def train_step(
        self, step: int, groups: Sequence[Group], late: frozenset[int] = frozenset()
    ) -> Stats:
        """See `Trainer`. The critic's updates, then the policy's but for its warm-up steps."""
        plan = self._planner.plan(step, groups, late)
        stats = {"actor/skipped": 0.0, **plan.stats}
        if self.critic is not None:
            stats |= self.critic.train(step, plan.values)
        if plan.minis:
            stats |= self._train_policy(step, plan.minis)
        stats["actor/skipped"] = max(stats["actor/skipped"], stats.get("critic/skipped", 0.0))
        return {name: value for name, value in stats.items() if math.isfinite(value)}

    def _train_policy(self, step: int, minis: Sequence[Mini]) -> Stats:
        """Updates: ppo_epochs over the mini-batches, in the batch's order."""
        lr = self._optimiser.set_lr(step)
        rows = [self._update(mini) for _ in range(self._spec.actor.ppo_epochs) for mini in minis]
        stats = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        for name in ("actor/skipped", "training/rollout_probs_diff_max"):
            stats[name] = max(row[name] for row in rows)
        return {**stats, "actor/lr": lr}

    def _update(self, mini: Mini) -> Stats:
        """One optimiser update on a mini-batch, or none when it is not finite."""
        recorded = backward(
            self._policy,
            mini.share,
            mini.num_rows,
            mini.divisor,
            self._spec.rollout.temperature,
            self._objective,
            self._device,
        )
        part, largest = sums_of(mini.share, recorded)
        names = sorted(metrics.SUMS)
        sums = dict(zip(names, self._totals.sum([part[name] for name in names]), strict=True))
        (largest,) = self._totals.max([largest])
        norm, applied = self._optimiser.update(sums["loss"])
        return {
            **loss_stats(sums, mini.divisor, self._spec.actor),
            "actor/grad_norm": norm,
            "actor/skipped": 0.0 if applied else 1.0,
            "training/rollout_probs_diff_max": largest,
            **metrics.summarise(sums),
        }

    def hold(self, until: Future[Any]) -> None:
        """See `Trainer`."""
        for optimiser in self._optimisers:
            optimiser.hold(until)

    def digest(self) -> str:
        """See `Trainer`. GPUs do not repeat bits: not worth a copy of all weights there."""
        if self._device.type != "cpu":
            return ""
        mine = combined_digest(
            digest_of(tensor_bytes(own(parameter)))
            for optimiser in self._optimisers
            for parameter in optimiser.parameters.values()
        )
        if self._world == 1:
            return mine
        part = torch.frombuffer(bytearray.fromhex(mine), dtype=torch.uint8)
        parts = [torch.empty_like(part) for _ in range(self._world)]
        dist.all_gather(parts, part)
        return combined_digest(p.numpy().tobytes().hex() for p in parts)

    def weights(self) -> list[tuple[str, Tensor]]:
        """See `Trainer`. A tied lm_head is not listed twice."""
        wanted = self._spec.rollout.dtype
        dtype = getattr(torch, resolve_dtype(wanted, on_gpu=self._device.type != "cpu"))
        places: dict[str, Tensor] = {}
        if self._rank == 0:  # a parameter's shape is the whole's, also when it is sharded
            shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
            places = self._room.lay_out(shapes, dtype)
        named = self._gather(lambda name, tensor: places[name].copy_(tensor))
        # in the order in which they lie, which the conversion of names does not keep
        lying = {name: named[name] for name in places if name in named}
        return list((lying | named).items())

    @torch.no_grad()
    def _gather(self, copied: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
        """Copies on the host under their published names, on rank 0."""
        gathered: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            tensor = whole(parameter)
            if self._rank == 0:
                gathered[name] = copied(name, tensor)
        return self._named(gathered) if self._rank == 0 else {}

    def state(self) -> dict[str, Any]:
        """See `Trainer`. Loads at any number of ranks."""
        state: dict[str, Any] = {**self._optimiser.state()}
        if self.critic is not None:
            state |= self.critic.optimiser.state("critic_")
        if self._spec.algorithm.kl_ctrl.type == "adaptive":
            state["kl_ctrl"] = {"kl_coef": self._kl_controller.state}
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """See `Trainer`. InvalidSpec when the state is of another model."""
        live = self.state()
        for kind, tensors in live.items():
            if state.get(kind, {}).keys() != tensors.keys():
                raise InvalidSpec(f"the checkpoint is of another model: {kind} differs in names")
            for name, tensor in tensors.items():
                tensor.copy_(state[kind][name])
        for optimiser in self._optimisers:
            optimiser.refresh()

    def export(self, path: Path) -> None:
        """See `Trainer`. Config and tokenizer are the source folder's."""
        dtype = self._written.dtype
        weights = self._gather(lambda _, tensor: tensor.to("cpu", dtype, copy=True))
        if self._rank == 0:
            self._written.write(path, weights)
        if self._world > 1:
            dist.barrier()


class FsdpTrainer(ModelTrainer):
    """Any `transformers` causal language model, sharded by FSDP2 over several ranks."""

    def __init__(
        self,
        model_path: str | Path,
        spec: JobSpec,
        rank: int,
        world: int,
        device: torch.device,
        critic_path: Path | None = None,
    ) -> None:
        """Loads the model. InvalidSpec when the folder or its architecture cannot be trained."""
        super().__init__(place_fsdp, model_path, spec, rank, world, device, critic_path)

    @property
    def policy(self) -> Policy:
        """See `ModelTrainer`."""
        assert isinstance(self._policy, Policy)
        return self._policy
