"""What of a job no fleet could run, found before anything is started; nothing is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.adapter_size import check_targets
from headway.errors import InvalidSpec
from headway.graders import validate_grader
from headway.jobspec import JobSpec
from headway.model_size import ModelShape, local_folder, read_shape
from headway.plan_data import check_grader_data_sets, first_item


def check_job(job: JobSpec) -> ModelShape | None:
    """Refuses a job that no fleet could run; returns the model's shape if it is here.

    InvalidSpec: no such model folder, unknown grader or data set, lengths beyond the model,
    adapters for layers that it does not have.
    """
    folder = local_folder(job.model.path)
    shape = read_shape(folder) if folder is not None else None
    _check_graders(job, "data", None)
    if shape is not None and 0 < shape.max_positions < job.model.max_model_len:
        raise InvalidSpec(
            f"model.max_model_len {job.model.max_model_len} is beyond the {shape.max_positions}"
            f" positions of {job.model.path}"
        )
    if shape is not None:
        check_targets(job, shape)
    critic_shape(job, shape)
    for key, data in job.data_sets.items():
        _check_graders(job, key, first_item(data, key))
    return shape


def critic_shape(job: JobSpec, shape: ModelShape | None) -> ModelShape | None:
    """The shape of what the job's critic starts from, if it has one and that is here.

    `shape` is the policy's. InvalidSpec: no such model, or it cannot read the policy's tokens.
    """
    path, key = job.critic.model.path, "critic.model.path"
    if not job.has_critic or path is None:
        return shape if job.has_critic else None
    folder = local_folder(path, key)
    if folder is None:
        return None
    found = read_shape(folder, key)
    if shape is not None and found.vocab_size < shape.vocab_size:
        raise InvalidSpec(
            f"{key} {path} knows {found.vocab_size} tokens and model.path {shape.vocab_size}: a"
            " critic reads what the policy writes"
        )
    if 0 < found.max_positions < job.model.max_model_len:
        raise InvalidSpec(
            f"model.max_model_len {job.model.max_model_len} is beyond the {found.max_positions}"
            f" positions of {key} {path}"
        )
    return found


def check_pools(job: JobSpec, num_rollouts: int) -> None:
    """InvalidSpec when a fleet of this size could never start the job."""
    if num_rollouts < job.rollout.min_nodes:
        raise InvalidSpec(
            f"the job needs {job.rollout.min_nodes} rollout node(s) (rollout.min_nodes) and the"
            f" fleet would have {num_rollouts}: raise --rollouts"
        )


def _check_graders(job: JobSpec, key: str, item: Mapping[str, Any] | None) -> None:
    """Checks what grades the data set under `key`, on its first item where there is one."""
    own = getattr(job.data_sets.get(key), "grader", None)
    where = f"{key}.grader" if own is not None else "reward.grader"
    grader = validate_grader(own if own is not None else job.reward.grader, item, where)
    check_grader_data_sets(grader, where)
