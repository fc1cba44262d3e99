"""What is seen of one job at this moment, for `GET /v1/jobs/{id}/waits`; judged by `diagnosis`.

Redis may be the very thing that everyone waits for: what the coordinator remembers is shown
without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from headway.diagnosis import JobView, NodeView, StoreView, diagnose, is_stuck
from headway.errors import HeadwayError, Unavailable
from headway.jobs import JobRecord
from headway.journal import Journal
from headway.ledger.redis_ledger import RedisLedger
from headway.redis_client import command
from services.coordinator.controller import Coordinator
from services.coordinator.fleet import Node

T = TypeVar("T")
_STORE_PATIENCE_S = 3.0  # well within a client's own: who asks shall hear that Redis hangs
_NUM_EVENTS = 200  # that are searched for excluded nodes
_NUM_EVENTS_SHOWN = 10


async def look_at(coordinator: Coordinator, job_id: str, limit_s: float) -> dict[str, Any]:
    """Findings and what they were made from, as plain JSON data. NotFound: no such job."""
    store = await _store_of(coordinator)
    record = await _record_of(coordinator, job_id, store)
    now = time.monotonic()
    job = JobView(
        job_id=record.job_id,
        state=record.state,
        step=record.step,
        total_steps=record.total_steps,
        waiting_for=record.waiting_for,
        error=record.error.message if record.error is not None else "",
        learner=record.learner,
        rollouts=record.rollouts,
        nodes=tuple(
            _node_view(node, record.job_id, coordinator.registry.silence_s(node.node_id, now), now)
            for node in coordinator.registry.nodes()
            if node.role == "reward" or node.node_id in (record.learner, *record.rollouts)
        ),
        store=store,
    )
    if not store.error:
        job = await _with_ledger(job, coordinator)
    findings = diagnose(job, limit_s)
    plain = asdict(replace(job, events=job.events[-_NUM_EVENTS_SHOWN:]))
    return {
        "healthy": not is_stuck(findings),
        "limit_s": limit_s,
        "findings": [asdict(finding) for finding in findings],
        "job": plain,
    }


async def _record_of(coordinator: Coordinator, job_id: str, store: StoreView) -> JobRecord:
    if not store.error:
        return await coordinator.store.get(job_id)
    remembered = coordinator.remembered(job_id)
    if remembered is None:
        raise Unavailable(f"no running job {job_id[:80]!r} is remembered, and {store.error}")
    return remembered


async def _store_of(coordinator: Coordinator) -> StoreView:
    began = time.monotonic()
    try:
        async with asyncio.timeout(_STORE_PATIENCE_S):
            info: dict[str, Any] = await command(coordinator.store.redis, "INFO", "memory")
    except HeadwayError as error:
        return StoreView(error=str(error))
    except TimeoutError:
        return StoreView(error=f"it gave no answer in {_STORE_PATIENCE_S:g} s")
    return StoreView(
        answer_s=time.monotonic() - began,
        used_bytes=int(info.get("used_memory", 0)),
        max_bytes=int(info.get("maxmemory", 0)),
    )


async def _with_ledger(job: JobView, coordinator: Coordinator) -> JobView:
    """The view with what Redis holds of the job; what it holds nothing of is left out."""
    redis = coordinator.store.redis
    ledger = RedisLedger(redis, job.job_id)
    members = await _or_none(ledger.members())
    return replace(
        job,
        ledger=await _or_none(ledger.look()),
        members=None if members is None else {m.node_id: m.version for m in members},
        events=tuple(await _or_none(Journal(redis, job.job_id).last_events(_NUM_EVENTS)) or ()),
    )


async def _or_none(call: Awaitable[T]) -> T | None:
    try:
        return await call
    except HeadwayError:  # a job that has not begun has no ledger
        return None


def _node_view(node: Node, job_id: str, silence_s: float, now: float) -> NodeView:
    report = node.report(job_id)
    return NodeView(
        node_id=node.node_id,
        role=node.role,
        silence_s=silence_s,
        phase=report.phase if report is not None else "",
        detail=report.detail if report is not None else "",
        version=report.version if report is not None else None,
        unchanged_s=now - node.changed_at if node.changed_at else 0.0,
        draining=node.draining,
        waits=node.waits,
    )
