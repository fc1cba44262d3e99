"""`headway plan JOB.yaml`: what a job would do and need. Changes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from headway.cli.exits import BAD_USAGE, SUCCEEDED
from headway.cli.options import as_json, fleet_options, fleet_spec, job_file, overrides, read_job
from headway.errors import InvalidSpec
from headway.fleet.spec import LocalFleetSpec
from headway.jobspec import JobSpec
from headway.plan import Plan, Pools, gib, longest_completion, make_plan, this_machine


@click.command("plan")
@job_file
@overrides
@as_json
@fleet_options
def command(job_file: Path, overrides: tuple[str, ...], as_json: bool, **fleet: Any) -> int:
    """Show what a job would do and need on this machine; change nothing.

    Exit code 2 when it cannot run here.
    """
    plan = plan_for(read_job(job_file, overrides), fleet_spec(**fleet))
    click.echo(_json(plan) if as_json else _text(plan))
    for problem in plan.problems:
        click.echo(f"error: {problem}", err=True)
    return BAD_USAGE if plan.problems else SUCCEEDED


def plan_for(job: JobSpec, spec: LocalFleetSpec) -> Plan:
    """The plan of a job on a local fleet. InvalidSpec when it could run nowhere."""
    pools = Pools(spec.engine, spec.num_rollouts, spec.learner_cores, spec.rollout_cores)
    return make_plan(job, this_machine(spec.runs_dir), pools, spec.runs_dir)


def require_runnable(job: JobSpec, spec: LocalFleetSpec) -> None:
    """InvalidSpec, with every problem, when the job cannot run on this fleet."""
    problems = plan_for(job, spec).problems
    if problems:
        raise InvalidSpec("\n       ".join(problems))


def _json(plan: Plan) -> str:
    plain = asdict(plan)
    plain["job"] = plan.job.model_dump(mode="json")
    return json.dumps(plain, indent=2, default=str)


def _text(plan: Plan) -> str:
    sections = [
        ("Job (resolved)", plan.job.to_yaml().rstrip().splitlines()),
        ("Batch", _batch(plan)),
        ("Held-out data", _held_out(plan)),
        ("Pools", _pools(plan)),
        ("Memory (estimate)", _memory(plan)),
        ("Written", [f"{f.path}  {_size(f.size)}  {f.what}" for f in plan.files]),
        ("Notes", list(plan.notes)),
    ]
    return "\n\n".join(
        "\n".join([click.style(title, bold=True), *(f"  {line}" for line in lines)])
        for title, lines in sections
        if lines
    )


def _batch(plan: Plan) -> list[str]:
    batch, job = plan.batch, plan.job
    if batch is None:
        return []
    epochs = "" if batch.data_epochs is None else f", {batch.data_epochs:.3g} passes over the data"
    lines = [
        f"{batch.groups} groups x {job.rollout.n} completions = {batch.completions} completions a"
        f" step, at most {batch.max_new_tokens:,} new tokens",
        f"{batch.updates} optimiser update(s) a step of {job.mini_batch_size} groups; a packed row"
        f" has at most {batch.max_row_tokens:,} tokens",
        f"{batch.steps} steps, {batch.tickets:,} groups trained on{epochs}",
        f"at most {batch.groups} x ({job.algorithm.max_policy_lag} + 1) ="
        f" {batch.max_outstanding_groups} groups started and not yet trained on; no token lags"
        f" more than {job.algorithm.max_policy_lag} version(s)",
    ]
    if job.has_critic:
        critic_updates = batch.groups // job.critic_mini_batch_size * job.critic_epochs
        lines.insert(
            2,
            f"{critic_updates} update(s) a step of the critic, of {job.critic_mini_batch_size}"
            f" groups; it alone is trained in the first {job.trainer.critic_warmup} steps",
        )
    return lines


def _held_out(plan: Plan) -> list[str]:
    if (held_out := plan.held_out) is None:
        return []
    times = "once" if held_out.rounds == 1 else f"at {held_out.rounds} versions"
    return [
        f"{held_out.prompts:,} prompts x {held_out.n} completions of at most"
        f" {held_out.max_tokens:,} tokens, {times}: {held_out.completions:,} completions"
    ]


def _pools(plan: Plan) -> list[str]:
    pools, job = plan.pools, plan.job
    lead = f"lead process on cores {_cores(pools.learner_cores)}"
    return [
        lead
        if job.kind == "eval"
        else f"learner: {job.actor.num_ranks} rank(s) on cores {_cores(pools.learner_cores)}",
        f"rollout: {pools.num_rollouts} node(s), engine {pools.engine}, on cores"
        f" {_cores(pools.rollout_cores)}",
    ]


def _memory(plan: Plan) -> list[str]:
    if plan.shape is None or plan.learner is None or plan.rollout is None:
        return []
    lines = [f"model: {plan.shape.num_params:,} parameters"]
    if plan.critic is not None:
        lines.append(f"critic: {plan.critic.num_params:,} parameters")
    for name, pool, count in (
        (
            "lead process" if plan.batch is None else "learner rank",
            plan.learner,
            plan.job.actor.num_ranks,
        ),
        ("rollout node", plan.rollout, plan.pools.num_rollouts),
    ):
        lines.append(f"{name}: {gib(pool.total)}" + (f" x {count}" if count != 1 else ""))
        lines += [f"  {gib(size):>10}  {term}" for term, size in pool.terms.items()]
    if plan.kv_tokens is not None:
        longest = longest_completion(plan.job)
        lines.append(
            f"KV cache of a node: {plan.kv_tokens:,} tokens, {plan.kv_tokens // longest:,}"
            f" completions of the longest kind ({longest} tokens) at once"
        )
    lines.append(f"all together: {gib(plan.total_memory or 0)} of {gib(plan.machine.memory)}")
    return lines


def _cores(cores: tuple[int, ...]) -> str:
    return ",".join(str(core) for core in cores) or "none"


def _size(size: int | None) -> str:
    return "size unknown" if size is None else f"about {gib(size)}"
