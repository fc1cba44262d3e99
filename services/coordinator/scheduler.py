"""Who works on what: a pure function from the jobs and the fleet to decisions.

`plan` looks at what is, not at what happened, so it is safe to run at any moment and
as often as one likes; when it has nothing left to say the fleet is as it should be.

A queued job starts when a learner is free, `rollout.min_nodes` rollout nodes are free
and a reward service is there. First come, first served: while the first job that
could run on this fleet lacks rollout nodes, no later job and no running one gets
them. A job that would not fit even an idle fleet holds nobody up. Nodes that no queued
job can use join the running jobs, those with the fewest nodes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.jobs import ENDED, JobError, JobRecord, Trigger
from services.coordinator.decisions import (
    MAX_NODE_FAILURES,
    AddRollouts,
    Adopt,
    Decision,
    DropRollout,
    End,
    LoseLearner,
    LoseRollout,
    Progress,
    Running,
    Start,
    Wait,
)
from services.coordinator.fleet import JobReport, Node, Role

_ROLES: tuple[Role, ...] = ("learner", "rollout", "reward")
MAX_ATTEMPTS = 3  # starts of a job on a learner, without one new step, before it has failed
_TRIGGERS: dict[str, Trigger] = {"succeeded": "succeed", "failed": "fail", "cancelled": "stop"}
_LOST = "left or fell silent"


def plan(
    jobs: Sequence[JobRecord], nodes: Sequence[Node], expected: frozenset[str] = frozenset()
) -> list[Decision]:
    """Decisions to be applied, in order; plan again after that until there are none.

    `jobs` are those that have not ended, oldest first. `expected` names processes that
    have not registered yet but are not lost either (the coordinator has just started).
    """
    fleet = {node.node_id: node for node in nodes}
    held = {job.learner for job in jobs if job.learner}
    facts: list[Decision] = []
    for job in jobs:
        mine = list(_job_facts(job, fleet, expected, held))
        held.update(fact.learner for fact in mine if isinstance(fact, Adopt))
        facts += mine or _rollout_facts(job, fleet, expected)
    if facts:
        return facts
    pools = _Pools(jobs, nodes)
    starts, reserved = _starts(jobs, pools)
    growth = [] if reserved else _growth(jobs, pools)
    return [*starts, *growth, *_starvation(jobs, pools, expected)]


def missing_for(min_nodes: int, nodes: Sequence[Node]) -> str:
    """What a fleet lacks, even were it idle, to run a job; "" when it lacks nothing."""
    live = [node for node in nodes if not node.draining]
    num = {role: sum(node.role == role for node in live) for role in _ROLES}
    lacks: list[str] = []
    if not num["learner"]:
        lacks.append("a learner")
    if num["rollout"] < min_nodes:
        lacks.append(f"{min_nodes} rollout nodes (there are {num['rollout']})")
    if not num["reward"]:
        lacks.append("a reward service")
    return " and ".join(lacks)


def _job_facts(
    job: JobRecord, fleet: dict[str, Node], expected: frozenset[str], held: set[str]
) -> Iterator[Decision]:
    """What the job's learner says of it, or its silence."""
    holder = job.learner or job.lost_learner
    node = fleet.get(holder) if holder else None
    report = node.report(job.job_id) if node else None
    step, run_dir = _progress(job, report)
    hands_on = bool(node and node.draining and report and report.phase == "cancelled")
    if job.state == "queued":
        if report and report.phase in ENDED and not hands_on:
            yield _end(job, report, step, run_dir)
        elif report and node and report.phase not in ENDED and node.node_id not in held:
            yield Adopt(job.job_id, node.node_id)
    elif node is None:
        if job.learner and job.learner not in expected:
            yield _learner_lost(job, job.learner, _LOST)
    elif report is None:
        # It never began, or is another process than the one that did. Should it begin
        # at this moment, its next heartbeat's answer no longer lists the job.
        if job.state == "cancelling" and node.heard_at is not None:
            yield End(job.job_id, "stop", None, step, run_dir)
    elif hands_on and job.state != "cancelling":
        yield _learner_lost(job, node.node_id, "is shutting down")
    elif report.phase in ENDED:
        yield _end(job, report, step, run_dir)
    else:
        if job.state == "starting" and report.phase == "running":
            yield Running(job.job_id)
        if (step, run_dir) != (job.step, job.run_dir):
            yield Progress(job.job_id, step, run_dir)


def _rollout_facts(
    job: JobRecord, fleet: dict[str, Node], expected: frozenset[str]
) -> Iterator[Decision]:
    """Rollout nodes that are gone or gave up, and the end of a job that none can serve."""
    for node_id in job.rollouts:
        node = fleet.get(node_id)
        if node is None:
            if node_id not in expected:
                yield LoseRollout(job.job_id, node_id, _LOST)
            continue
        report = node.report(job.job_id)
        if report and report.phase == "failed":
            yield DropRollout(job.job_id, node_id, _error(report))
    if job.state not in ("starting", "running") or job.rollouts:
        return
    present = [node for node in fleet.values() if node.role == "rollout"]
    if present and not any(_may_serve(node, job) for node in present):
        last = job.rollout_failures[present[-1].node_id]
        message = f"no rollout node can serve the job; {present[-1].node_id}: {last.message}"
        step, run_dir = job.step, job.run_dir
        yield End(job.job_id, "fail", JobError(last.kind, message), step, run_dir)


class _Pools:
    """The fleet, seen as what is free and what there is at all."""

    def __init__(self, jobs: Sequence[JobRecord], nodes: Sequence[Node]) -> None:
        active = {job.job_id for job in jobs}
        taken = {job.learner for job in jobs} | {n for job in jobs for n in job.rollouts}
        idle = [n for n in nodes if n.node_id not in taken and _idle(n, active)]
        self.learners = [n.node_id for n in idle if n.role == "learner"]
        self.rollouts = [n for n in idle if n.role == "rollout"]
        self.all_rollouts = [n for n in nodes if n.role == "rollout" and not n.draining]
        self.has_rewards = any(n.role == "reward" for n in nodes)

    def rollouts_for(self, job: JobRecord) -> list[str]:
        """Free rollout nodes that may serve `job`."""
        return [n.node_id for n in self.rollouts if _may_serve(n, job)]

    def take(self, learner: str | None, rollouts: Sequence[str]) -> None:
        """Takes nodes away from what is free."""
        self.learners = [n for n in self.learners if n != learner]
        self.rollouts = [n for n in self.rollouts if n.node_id not in rollouts]


def _starts(jobs: Sequence[JobRecord], pools: _Pools) -> tuple[list[Decision], bool]:
    """Starts of queued jobs, what the others wait for, and whether free nodes are reserved."""
    decisions: list[Decision] = []
    reserved = False
    for job in jobs:
        if job.state != "queued":
            continue
        free = pools.rollouts_for(job)
        num_needed = max(0, job.min_nodes - len(job.rollouts))
        lacks: list[str] = []
        if not pools.learners:
            lacks.append("a free learner")
        if num_needed > len(free):
            lacks.append(f"{num_needed - len(free)} more free rollout nodes")
        if not pools.has_rewards:
            lacks.append("a reward service")
        if reserved:
            lacks.append("its turn")
        if not lacks:
            chosen = (*job.rollouts, *free[:num_needed])
            decisions.append(Start(job.job_id, pools.learners[0], chosen))
            pools.take(pools.learners[0], chosen)
            continue
        if (missing := " and ".join(lacks)) != job.waiting_for:
            decisions.append(Wait(job.job_id, missing))
        could_run = sum(_may_serve(n, job) for n in pools.all_rollouts) >= job.min_nodes
        if pools.learners and pools.has_rewards and could_run:
            reserved = True
    return decisions, reserved


def _growth(jobs: Sequence[JobRecord], pools: _Pools) -> list[Decision]:
    """Hands free rollout nodes to running jobs, one at a time to the one with the fewest."""
    growing = [job for job in jobs if job.state in ("starting", "running")]
    gains: dict[str, list[str]] = {job.job_id: [] for job in growing}

    def size(job: JobRecord) -> int:
        return len(job.rollouts) + len(gains[job.job_id])

    for node in list(pools.rollouts):
        takers = [
            job
            for job in growing
            if _may_serve(node, job) and (job.max_nodes is None or size(job) < job.max_nodes)
        ]
        if takers:
            gains[min(takers, key=size).job_id].append(node.node_id)
    return [AddRollouts(job_id, tuple(gain)) for job_id, gain in gains.items() if gain]


def _starvation(
    jobs: Sequence[JobRecord], pools: _Pools, expected: frozenset[str]
) -> Iterator[Decision]:
    """What jobs under way lack."""
    if expected:  # the coordinator has just started and does not know yet
        return
    for job in jobs:
        if job.state not in ("starting", "running"):
            continue
        lacks = [] if job.rollouts else ["a rollout node"]
        if not pools.has_rewards:
            lacks.append("a reward service")
        if (missing := " and ".join(lacks)) != job.waiting_for:
            yield Wait(job.job_id, missing)


def _idle(node: Node, active: set[str]) -> bool:
    """Whether a node that no job has is ready for one: it has stopped and forgotten the last."""
    at_work = any(r.phase not in ENDED or r.job_id in active for r in node.reports)
    return node.heard_at is not None and not node.draining and not at_work


def _may_serve(node: Node, job: JobRecord) -> bool:
    failure = job.rollout_failures.get(node.node_id)
    return failure is None or failure.count < MAX_NODE_FAILURES


def _learner_lost(job: JobRecord, node: str, reason: str) -> Decision:
    fruitless = job.attempt - job.best_attempt
    if fruitless < MAX_ATTEMPTS or job.state == "cancelling":
        return LoseLearner(job.job_id, node, reason)
    message = (
        f"learner {node} {reason}, at attempt {fruitless} of {MAX_ATTEMPTS} without a new step"
    )
    return End(job.job_id, "fail", JobError("node_lost", message), job.step, job.run_dir)


def _end(job: JobRecord, report: JobReport, step: int, run_dir: str) -> Decision:
    error = _error(report) if report.phase == "failed" else None
    return End(job.job_id, _TRIGGERS[report.phase], error, step, run_dir)


def _error(report: JobReport) -> JobError:
    return JobError(report.error_kind or "internal", report.detail or "no reason was given")


def _progress(job: JobRecord, report: JobReport | None) -> tuple[int, str]:
    """Steps done and run folder, as reported or else as known."""
    if report is None:
        return job.step, job.run_dir
    step = job.step if report.version is None else report.version
    return step, report.run_dir or job.run_dir
