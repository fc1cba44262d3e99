"""A job as a user writes it. Names follow verl and TRL where they have one.

Unknown keys are refused with the nearest known one; see docs/job-spec.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from headway import jobspec_eval
from headway.errors import InvalidSpec
from headway.evaluation.spec import EvalDataSpec, EvaluationSpec
from headway.graders.sources import with_sources
from headway.jobspec_algorithm import AlgorithmSpec, CorrectionSpec, KlCtrlSpec
from headway.jobspec_errors import explain
from headway.jobspec_model import ModelSpec
from headway.jobspec_sampling import DataSpec, OverlongSpec, RewardSpec, RolloutSpec
from headway.jobspec_section import Section
from headway.jobspec_training import ActorSpec, CriticSpec, OptimSpec, TrainerSpec
from headway.rl import names
from headway.yamls import check_plain, dump_yaml, load_yaml

__all__ = [
    "ActorSpec",
    "AlgorithmSpec",
    "CorrectionSpec",
    "CriticSpec",
    "DataSpec",
    "EvalDataSpec",
    "EvaluationSpec",
    "JobSpec",
    "KlCtrlSpec",
    "ModelSpec",
    "OptimSpec",
    "OverlongSpec",
    "RewardSpec",
    "RolloutSpec",
    "Section",
    "TrainerSpec",
    "load_job",
    "parse_job",
    "set_key",
]

MAX_JOB_BYTES = 256 << 10
"""Of a job as it is written, in a file or in a request."""


class JobSpec(Section):
    """A whole job."""

    kind: Literal["train", "eval"] = Field(
        default="train", description="eval: samples and grades data sets, and trains nothing"
    )
    name: str = Field(default="job", pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")
    seed: int = Field(default=0, ge=0, lt=2**31)
    model: ModelSpec
    data: DataSpec
    reward: RewardSpec
    algorithm: AlgorithmSpec = AlgorithmSpec()
    actor: ActorSpec = ActorSpec()
    critic: CriticSpec = CriticSpec()
    rollout: RolloutSpec = RolloutSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    trainer: TrainerSpec

    @model_validator(mode="before")
    @classmethod
    def _eval_is_completed(cls, raw: Any) -> Any:
        is_eval = isinstance(raw, dict) and raw.get("kind") == "eval"
        return jobspec_eval.completed(raw) if is_eval else raw

    @model_serializer(mode="wrap")
    def _eval_is_pruned(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        return jobspec_eval.pruned(dumped) if self.kind == "eval" else dumped

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.kind == "train":
            self._check_batches()
            self._check_groups()
            self._check_critic()
            self._check_adapters()
            self._check_lengths()
        jobspec_eval.check(self)
        if self.rollout.max_nodes is not None and self.rollout.max_nodes < self.rollout.min_nodes:
            raise ValueError("rollout.max_nodes is below rollout.min_nodes")
        return self

    def _check_batches(self) -> None:
        batch = self.data.train_batch_size
        minis = {"actor": self.mini_batch_size, "critic": self.critic_mini_batch_size}
        for who, mini in minis.items():
            if batch % mini:
                raise ValueError(
                    f"{who}.ppo_mini_batch_size {mini} does not divide data.train_batch_size"
                    f" {batch}"
                )
            self.actor.check_batch(mini, who)

    def _check_lengths(self) -> None:
        longest = self.data.max_prompt_length + self.rollout.max_tokens
        if longest > self.model.max_model_len:
            raise ValueError(
                f"data.max_prompt_length {self.data.max_prompt_length} + rollout.max_tokens"
                f" {self.rollout.max_tokens} exceeds model.max_model_len {self.model.max_model_len}"
            )
        budget = self.actor.ppo_max_token_len_per_gpu
        if budget is not None and budget < longest:
            raise ValueError(
                f"actor.ppo_max_token_len_per_gpu {budget} is below data.max_prompt_length +"
                f" rollout.max_tokens = {longest}: no row could hold the longest answer"
            )

    def _check_groups(self) -> None:
        n, name = self.rollout.n, self.algorithm.adv_estimator
        if n == 1 and name not in names.WITHOUT_GROUPS and self.algorithm.custom is None:
            raise ValueError(
                f"rollout.n is 1: algorithm.adv_estimator {name} compares completions of one prompt"
                " and needs at least 2"
            )
        alone = n == 1 and not self.algorithm.greedy_baseline
        if alone and self.algorithm.dynamic_sampling:
            raise ValueError(
                "rollout.n is 1: algorithm.dynamic_sampling would filter every group, for one"
                " completion has no variance"
            )
        overlong = self.reward.overlong_buffer
        if overlong.enable and overlong.len > self.rollout.max_tokens:
            raise ValueError(
                f"reward.overlong_buffer.len {overlong.len} is more than rollout.max_tokens"
                f" {self.rollout.max_tokens}"
            )

    def _check_critic(self) -> None:
        warmup, steps = self.trainer.critic_warmup, self.trainer.total_training_steps
        if not self.has_critic:
            key = "trainer.critic_warmup" if warmup else "critic"
            if warmup or self.critic != CriticSpec():
                raise ValueError(
                    f"{key} is of the critic, which algorithm.adv_estimator"
                    f" {self.algorithm.adv_estimator} has not: gae has one"
                )
        elif self.actor.strategy != "fsdp":
            raise ValueError(
                f"actor.strategy {self.actor.strategy} has no critic, which"
                " algorithm.adv_estimator gae needs: use strategy fsdp"
            )
        elif warmup >= steps:
            raise ValueError(
                f"trainer.critic_warmup {warmup} leaves none of the {steps} steps"
                " (trainer.total_training_steps) to the policy"
            )

    def _check_adapters(self) -> None:
        rank, strategy = self.model.lora_rank, self.actor.strategy
        if rank and strategy != "fsdp":
            raise ValueError(
                f"model.lora_rank {rank} needs actor.strategy fsdp: {strategy} trains all weights"
            )
        if rank and self.has_critic:
            raise ValueError(
                f"model.lora_rank {rank} is not possible with algorithm.adv_estimator gae, whose"
                " critic trains all weights: leave lora_rank at 0 or use another estimator"
            )

    def validates(self, version: int) -> bool:
        """Whether a training job's held-out data is sampled at this version, made by as many steps.

        Every `test_freq` steps, after the last step, and before the first where so asked.
        """
        every, last = self.evaluation.test_freq, self.trainer.total_training_steps
        if self.kind == "eval" or not every:
            return False
        if version == 0:
            return self.evaluation.val_before_train
        return version == last or (version < last and version % every == 0)

    @property
    def data_sets(self) -> dict[str, DataSpec | EvalDataSpec]:
        """Every data set that the job reads, by the key that holds it."""
        own: dict[str, DataSpec | EvalDataSpec] = {} if self.kind == "eval" else {"data": self.data}
        held_out = {f"evaluation.data.{i}": data for i, data in enumerate(self.evaluation.data)}
        return {**own, **held_out}

    @property
    def max_answer(self) -> int:
        """Tokens that a completion of held-out data may have."""
        return self.evaluation.max_tokens or self.rollout.max_tokens

    @property
    def completions_a_ticket(self) -> int:
        """What is sampled for one prompt: n, and the greedy one where it is the baseline."""
        return self.rollout.n + self.algorithm.greedy_baseline

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained beside the policy (PPO)."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether the learner holds the first weights as well, frozen, for a KL."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def mini_batch_size(self) -> int:
        """Groups an optimiser update."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def critic_mini_batch_size(self) -> int:
        """Groups an optimiser update of the critic."""
        return self.critic.ppo_mini_batch_size or self.mini_batch_size

    @property
    def critic_epochs(self) -> int:
        """Passes of the critic over a batch."""
        return self.critic.ppo_epochs or self.actor.ppo_epochs

    def digest(self) -> str:
        """SHA-256 of the resolved job, hexadecimal."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def canonical_json(self) -> str:
        """The resolved job, keys sorted, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def to_yaml(self) -> str:
        """The resolved job, every default written out."""
        return dump_yaml(self.model_dump(mode="json"))


def parse_job(raw: object) -> JobSpec:
    """A job from plain data. InvalidSpec names each faulty key and its nearest known one."""
    if not isinstance(raw, dict):
        raise InvalidSpec("a job is a mapping of keys to values; see docs/job-spec.md")
    try:
        return JobSpec.model_validate(raw)
    except ValidationError as error:
        raise InvalidSpec("; ".join(explain(e, JobSpec) for e in error.errors())) from None


def load_job(
    path: Path, overrides: Sequence[tuple[str, Any]] = (), max_bytes: int | None = None
) -> JobSpec:
    """A job from a YAML (or JSON) file. InvalidSpec says what is wrong and where.

    A file that a grader names by `path` is read, and its text becomes a part of the job.
    `overrides` are (dotted key, value), applied in order before the job is checked.
    `max_bytes` is the most that a file may have which we did not write ourselves.
    """
    try:
        raw = load_yaml(_read_some(path, max_bytes))
    except OSError as error:
        raise InvalidSpec(f"cannot read the job file {path}: {error.strerror}") from None
    except (InvalidSpec, UnicodeDecodeError) as error:
        raise InvalidSpec(f"{path} is not YAML: {error}") from None
    try:
        for key, value in overrides:
            set_key(raw, key, value)
        check_plain(raw, "the job")
        return parse_job(with_sources(raw, path.parent))
    except InvalidSpec as error:
        raise InvalidSpec(f"{path}: {error}") from None


def _read_some(path: Path, max_bytes: int | None) -> str:
    """The file's text; InvalidSpec when there is more of it, as of a device."""
    with path.open("rb") as file:
        data = file.read() if max_bytes is None else file.read(max_bytes + 1)
    if max_bytes is not None and len(data) > max_bytes:
        raise InvalidSpec(f"it has more than {max_bytes >> 10} KiB")
    return data.decode("utf-8-sig")


def set_key(raw: object, key: str, value: Any) -> None:
    """Sets a dotted key of a job as plain data. InvalidSpec when what holds it is no section."""
    *sections, leaf = key.split(".")
    for section in sections:
        if isinstance(raw, dict):
            raw = raw.setdefault(section, {})
    if isinstance(raw, dict):
        raw[leaf] = value
    else:
        raise InvalidSpec(f"{key} cannot be set: {'.'.join(sections) or 'the job'} is no section")
