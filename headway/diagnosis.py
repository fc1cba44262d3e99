"""Who waits for whom in a job: from what was seen at one moment to findings. Pure.

A finding says who waits, for whom and how long. It is `stuck` when that is longer than
the limit, or when no waiting will help; a job with a stuck finding is not healthy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headway.jobs import ENDED, progress
from headway.ledger.api import LeaseView, LedgerView
from headway.rl import schedule
from headway.waits import Wait

DEFAULT_LIMIT_S = 60.0
START_S = 900.0  # that a large model may take until its engines have started
_SLOW_STORE_S = 0.5
_NEARLY_FULL = 0.9
_SILENT_S = 5.0  # several heartbeats
_MAX_HOLDERS = 5  # named in one sentence
# Waiting is these processes' trade: their own words come after whoever keeps them waiting.
_USUAL = frozenset({"schedule", "tickets", "sampling", "drain"})
_LEFT_OUT = frozenset({"weights_missed", "weights_refused", "member_lost"})
_BACK = frozenset({"weights_caught_up", "member_joined"})

Level = Literal["ok", "waits", "stuck"]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A process that works on the job, as the coordinator last heard it. Seconds."""

    node_id: str
    role: str
    silence_s: float  # since its last heartbeat
    phase: str = ""
    detail: str = ""
    version: int | None = None  # installed, or the learner's step
    unchanged_s: float = 0.0  # since phase, detail or version were last new
    draining: bool = False
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreView:
    """Redis, as the coordinator finds it."""

    error: str = ""  # why it cannot be used; empty when it answers
    answer_s: float = 0.0
    used_bytes: int = 0
    max_bytes: int = 0  # 0: no bound


@dataclass(frozen=True, slots=True)
class JobView:
    """All that was seen of one job. Steps count from 0."""

    job_id: str
    state: str
    step: int
    total_steps: int
    waiting_for: str = ""  # resources that the coordinator misses
    error: str = ""
    learner: str | None = None
    rollouts: tuple[str, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    ledger: LedgerView | None = None
    members: Mapping[str, int | None] | None = None  # announced nodes -> installed version
    store: StoreView = StoreView()
    events: tuple[Mapping[str, Any], ...] = ()  # the last ones, oldest first


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing; `who` is a process, `job`, `ledger` or `redis`."""

    level: Level
    who: str
    text: str
    waited_s: float = 0.0


def diagnose(job: JobView, limit_s: float = DEFAULT_LIMIT_S) -> tuple[Finding, ...]:
    """Findings, the stuck ones first, then by how long they last. Never empty."""
    if job.state in ENDED:
        text = f"job {job.job_id} {job.state} at {progress(job.step, job.total_steps)}"
        return (Finding("ok", "job", text + (f": {job.error}" if job.error else "")),)
    found = [*_store(job.store), *_placed(job), *_steps(job, limit_s)]
    for node in job.nodes:
        found += _node(node, job, limit_s)
    found += _leases(job, limit_s)
    found += _excluded(job)
    if all(finding.level == "ok" for finding in found):
        text = f"job {job.job_id} is {job.state} at {progress(job.step, job.total_steps)}"
        found.insert(0, Finding("ok", "job", text))
    order = {"stuck": 0, "waits": 1, "ok": 2}
    return tuple(sorted(found, key=lambda f: (order[f.level], -f.waited_s)))


def is_stuck(findings: Sequence[Finding]) -> bool:
    """Whether anything needs a person."""
    return any(finding.level == "stuck" for finding in findings)


def describe_groups(view: LedgerView, waited_s: float) -> tuple[str, tuple[LeaseView, ...]]:
    """What the next step's batch lacks, in words, and the leases it cannot do without.

    Where no single ticket holds it up, the leases are all that are under way.
    """
    step, num_here = view.step + 1, len(view.arrived)
    needed = schedule.fill(view.step, view.deadlines, view.arrived, view.batch_groups).waiting_for
    holders = tuple(lease for lease in view.leases if lease.ticket_id in needed)
    here = f"{num_here} of {view.batch_groups} groups are here"
    if holders:
        named = ", ".join(
            f"ticket {h.ticket_id} on node {h.node_id}, {h.held_s:.0f} s, started at version"
            f" {h.start_version}"
            for h in holders[:_MAX_HOLDERS]
        )
        more = len(holders) - _MAX_HOLDERS
        named += f" and {more} more" if more > 0 else ""
        return f"step {step} waits for {named} (it waits {waited_s:.0f} s; {here})", holders
    if view.leases:
        by_node = Counter(lease.node_id for lease in view.leases)
        on = ", ".join(f"{count} on {node}" for node, count in sorted(by_node.items()))
        longest = max(view.leases, key=lambda lease: lease.held_s)
        text = (
            f"step {step} waits, {waited_s:.0f} s: {here}, {len(view.leases)} tickets are under way"
            f" ({on}), the longest is ticket {longest.ticket_id} on node {longest.node_id},"
            f" {longest.held_s:.0f} s"
        )
        return text, view.leases
    why = "no node has claimed any" if view.issued else "no ticket is issued"
    return f"step {step} waits, {waited_s:.0f} s: {here}, nothing is under way and {why}", ()


def _store(store: StoreView) -> list[Finding]:
    if store.error:
        return [Finding("stuck", "redis", f"Redis cannot be used: {store.error}")]
    found = []
    if store.max_bytes and store.used_bytes >= _NEARLY_FULL * store.max_bytes:
        full = store.used_bytes >= store.max_bytes
        text = (
            f"Redis holds {store.used_bytes:,} of {store.max_bytes:,} bytes"
            + (": nothing is issued, claimed or delivered until a checkpoint frees some" if full
               else "")
        )  # fmt: skip
        found.append(Finding("stuck" if full else "waits", "redis", text))
    if store.answer_s > _SLOW_STORE_S:
        text = f"Redis took {store.answer_s:.1f} s to answer a PING"
        found.append(Finding("waits", "redis", text, store.answer_s))
    return found


def _placed(job: JobView) -> list[Finding]:
    """Processes that the job should have and has not."""
    found = []
    if job.waiting_for:
        text = f"job {job.job_id} is {job.state} and waits for {job.waiting_for}"
        found.append(Finding("stuck", "job", text))
    known = {node.node_id for node in job.nodes}
    for node_id in (job.learner, *job.rollouts):
        if node_id is not None and node_id not in known:
            found.append(Finding("stuck", node_id, f"{node_id} has the job and is not in touch"))
    return found


def _steps(job: JobView, limit_s: float) -> list[Finding]:
    """The learner: what it waits for, or how long its step has been under way."""
    learner = next((n for n in job.nodes if n.node_id == job.learner), None)
    if learner is None or job.state not in ("starting", "running", "cancelling"):
        return []
    wait = max(
        (w for w in learner.waits if w.job_id in ("", job.job_id)),
        key=lambda w: w.waited_s,
        default=None,
    )
    if wait is not None:
        text = wait.detail or f"waits for {wait.reason}"
        if wait.reason == "groups" and job.ledger is not None:
            text, _ = describe_groups(job.ledger, wait.waited_s)
        engines_start = any(w.reason == "engine" for node in job.nodes for w in node.waits)
        if wait.reason == "nodes" and engines_start:
            limit_s = max(limit_s, START_S)
        level = _level(wait.waited_s, limit_s)
        return [Finding(level, learner.node_id, text, wait.waited_s)]
    if learner.unchanged_s <= (limit_s if job.state == "running" else max(limit_s, START_S)):
        return []
    doing = f"trains step {job.step + 1}" if job.state == "running" else f"is {job.state}"
    text = f"learner {learner.node_id} {doing} and has said nothing new"
    return [Finding("stuck", learner.node_id, text, learner.unchanged_s)]


def _node(node: NodeView, job: JobView, limit_s: float) -> list[Finding]:
    name = f"{node.role} {node.node_id}"
    if node.silence_s > _SILENT_S:
        text = f"{name} has not been heard for {node.silence_s:.0f} s"
        away = _level(node.silence_s, limit_s)
        return [Finding(away, node.node_id, text, node.silence_s)]
    found = []
    if node.phase == "failed":
        found.append(Finding("stuck", node.node_id, f"{name} gave the job up: {node.detail}"))
    if node.draining:
        found.append(Finding("waits", node.node_id, f"{name} drains: it takes nothing new"))
    if node.node_id == job.learner:
        return found  # `_steps` has it
    for wait in node.waits:
        if wait.job_id not in ("", job.job_id):
            continue
        limit = max(limit_s, START_S) if wait.reason == "engine" else limit_s
        level: Level = "ok" if wait.reason in _USUAL else _level(wait.waited_s, limit)
        text = f"{name}: {wait.detail}"
        if wait.reason == "schedule" and job.ledger is not None and node.version is not None:
            text += f" ({_slack(job.ledger, node.version)})"
        found.append(Finding(level, node.node_id, text, wait.waited_s))
    return found


def _slack(view: LedgerView, version: int) -> str:
    room = schedule.room(view.deadlines, view.step, version, view.max_policy_lag, view.batch_groups)
    return (
        f"at version {version} the lag rule leaves room for {room} more; the next step is"
        f" {view.step + 1}"
    )


def _leases(job: JobView, limit_s: float) -> list[Finding]:
    """Leases that nobody will end in good order, and long ones of nodes that are away."""
    if job.ledger is None:
        return []
    heard = {node.node_id for node in job.nodes if node.silence_s <= _SILENT_S}
    found = []
    for lease in job.ledger.leases:
        text = (
            f"ticket {lease.ticket_id} is on node {lease.node_id} (attempt {lease.attempt},"
            f" started at version {lease.start_version}), {lease.held_s:.0f} s"
        )
        if lease.left_s < 0:
            text += f"; its lease ran out {-lease.left_s:.0f} s ago and nobody has looked since"
            found.append(Finding("stuck", "ledger", text, lease.held_s))
        elif lease.node_id not in heard:
            text += f"; the node is silent, the lease ends in {lease.left_s:.0f} s"
            found.append(Finding(_level(lease.held_s, limit_s), "ledger", text, lease.held_s))
    return found


def _excluded(job: JobView) -> list[Finding]:
    """Announced nodes that were left out of a version and still lack the newest."""
    out: dict[str, str] = {}
    for row in job.events:
        node_id = str(row.get("node_id", ""))
        if row.get("kind") in _LEFT_OUT:
            out[node_id] = str(row.get("message", ""))
        elif row.get("kind") in _BACK:
            out.pop(node_id, None)
    newest = job.ledger.step if job.ledger is not None else 0
    behind = {
        node_id
        for node_id, version in (job.members or {}).items()
        if version is None or version < newest
    }
    return [
        Finding("waits", node_id, text)
        for node_id, text in sorted(out.items())
        if node_id in behind
    ]


def _level(waited_s: float, limit_s: float) -> Level:
    return "stuck" if waited_s > limit_s else "waits"
