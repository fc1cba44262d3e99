"""What a job would do and need on this machine, worked out before anything is started.

`make_plan` has the arithmetic, and what this machine lacks. It takes a second or so and fetches
nothing.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from headway.adapter_size import adapter_params
from headway.errors import HeadwayError
from headway.jobspec import JobSpec
from headway.memory import (
    GIB,
    SMALL_SERVICES_BYTES,
    PoolMemory,
    eval_lead_memory,
    kv_bytes_per_token,
    learner_rank_memory,
    longest_row,
    rollout_node_memory,
)
from headway.model_size import ModelShape
from headway.models import look_at
from headway.plan_checks import check_job, check_pools, critic_shape
from headway.plan_files import PlannedFile, planned_files
from headway.plan_held_out import HeldOut, held_out_of


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is. Memory and disk in bytes; `cores` are CPU indices."""

    cores: tuple[int, ...]
    memory: int
    free_disk: int
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Pools:
    """How a fleet shares the machine out."""

    engine: str
    num_rollouts: int
    learner_cores: tuple[int, ...]
    rollout_cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The job's arithmetic; groups are prompts with their n completions."""

    groups: int  # B, a step
    completions: int  # B * n, a step
    max_new_tokens: int  # B * n * max_tokens, a step; with a greedy one a group where remax is
    max_row_tokens: int  # of one pass of one rank: groups side by side
    updates: int  # optimiser updates a step
    steps: int
    tickets: int  # groups trained on in the whole job
    max_outstanding_groups: int  # B * (eta + 1): started and not yet trained on
    data_epochs: float | None  # passes over the data; None where its size is unknown


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `headway plan` shows. It can run when `problems` is empty."""

    job: JobSpec
    machine: Machine
    pools: Pools
    batch: Batch | None  # None: nothing is trained
    held_out: HeldOut | None  # None: nothing is evaluated
    shape: ModelShape | None
    critic: ModelShape | None  # what the critic starts from; None: there is none, or not here
    learner: PoolMemory | None  # one rank
    rollout: PoolMemory | None  # one node
    total_memory: int | None
    kv_tokens: int | None  # tokens the KV cache of a node holds
    files: tuple[PlannedFile, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def this_machine(runs_dir: Path) -> Machine:
    """The cores, memory and disk this process may use."""
    folder = runs_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory=min(psutil.virtual_memory().total, _cgroup_limit()),
        free_disk=shutil.disk_usage(folder).free,
        num_gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
    )


def batch_of(job: JobSpec) -> Batch:
    """The arithmetic of DESIGN section 3: B, n, steps, tickets and the bound on what is open."""
    groups, steps = job.data.train_batch_size, job.trainer.total_training_steps
    completions = groups * job.rollout.n
    sampled = groups * job.completions_a_ticket
    size = job.data.size if job.data.source == "reasoning_gym" else None
    return Batch(
        groups=groups,
        completions=completions,
        max_new_tokens=sampled * job.rollout.max_tokens,
        max_row_tokens=longest_row(job),
        updates=groups // job.mini_batch_size * job.actor.ppo_epochs,
        steps=steps,
        tickets=groups * steps,
        max_outstanding_groups=groups * (job.algorithm.max_policy_lag + 1),
        data_epochs=groups * steps / size if size else None,
    )


def make_plan(job: JobSpec, machine: Machine, pools: Pools, runs_dir: Path) -> Plan:
    """The whole plan. Raises what `check_job` raises; what this machine lacks is in `problems`."""
    shape = check_job(job)
    critic = critic_shape(job, shape)
    problems, notes = [], []
    try:
        check_pools(job, pools.num_rollouts)
    except HeadwayError as error:
        problems.append(str(error))
    learner = rollout = total = kv_tokens = None
    if shape is None:
        notes.append(
            f"{job.model.path} is not on this machine yet: it is fetched when the job starts,"
            " and sizes are not known before"
        )
    else:
        learner = (
            eval_lead_memory(job, shape)
            if job.kind == "eval"
            else learner_rank_memory(job, shape, critic)
        )
        rollout = rollout_node_memory(job, shape, pools.engine)
        nodes = pools.num_rollouts * rollout.total
        total = job.actor.num_ranks * learner.total + nodes + SMALL_SERVICES_BYTES
        if pools.engine != "sim":
            kv_tokens = int(job.rollout.kv_cache_gib * GIB) // kv_bytes_per_token(job, shape)
        problems += _memory_problems(job, machine, total, kv_tokens)
        if not shape.counted:
            notes.append("parameters are worked out from config.json: no safetensors files there")
    held_out = held_out_of(job)
    files = planned_files(job, shape, runs_dir, critic, held_out)
    needed = sum(file.size or 0 for file in files)
    if needed > machine.free_disk:
        problems.append(
            f"the run writes about {gib(needed)} to {runs_dir} and {gib(machine.free_disk)} is free"
        )
    problems += _custom_problems(job)
    notes += _notes(job, machine, pools)
    if shape is not None and job.model.lora_rank:
        notes.append(
            f"{adapter_params(job, shape):,} weights of adapters are trained and published, the"
            " model's stay as they are"
        )
    return Plan(
        job=job,
        machine=machine,
        pools=pools,
        batch=batch_of(job) if job.kind == "train" else None,
        held_out=held_out,
        shape=shape,
        critic=critic,
        learner=learner,
        rollout=rollout,
        total_memory=total,
        kv_tokens=kv_tokens,
        files=files,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def longest_completion(job: JobSpec) -> int:
    """Tokens of the longest prompt with its completion."""
    if job.kind == "eval":
        return job.model.max_model_len
    return job.data.max_prompt_length + job.rollout.max_tokens


def gib(size: float) -> str:
    """Bytes for people."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= step:
            return f"{size / step:.1f} {unit}"
    return f"{size:.0f} B"


def _memory_problems(
    job: JobSpec, machine: Machine, total: int, kv_tokens: int | None
) -> list[str]:
    problems = []
    if machine.num_gpus == 0 and total > machine.memory:
        problems.append(
            f"the job needs about {gib(total)} of memory and this machine has"
            f" {gib(machine.memory)}: fewer rollout nodes, a smaller rollout.kv_cache_gib,"
            " actor.gradient_checkpointing or a smaller model"
        )
    longest = longest_completion(job)
    if kv_tokens is not None and kv_tokens < longest:
        problems.append(
            f"rollout.kv_cache_gib {job.rollout.kv_cache_gib:g} holds {kv_tokens} tokens, fewer"
            f" than one prompt with its completion ({longest})"
        )
    return problems


def _custom_problems(job: JobSpec) -> list[str]:
    custom = job.algorithm.custom
    if custom is None or look_at(custom, "algorithm.custom").is_file():
        return []
    return [f"algorithm.custom: there is no file {custom}"]


def _notes(job: JobSpec, machine: Machine, pools: Pools) -> list[str]:
    notes = []
    if job.algorithm.custom is not None:
        notes.append(
            f"the learner runs {job.algorithm.custom}: algorithm.adv_estimator"
            f" {job.algorithm.adv_estimator} and policy_loss {job.algorithm.policy_loss} may be its"
        )
    if machine.num_gpus:
        notes.append("this machine has GPUs: their memory is not checked here")
    if set(pools.learner_cores) & set(pools.rollout_cores):
        notes.append("the pools share cores: steps take longer than either phase alone")
    return notes


def _cgroup_limit() -> int:
    """The container's memory limit in bytes; a huge number where there is none."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):
            continue
    return 1 << 62
