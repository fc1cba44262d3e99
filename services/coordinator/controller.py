"""The coordinator's one mind: jobs in the store, processes in the registry, a plan for both.

It turns requests into changes of job records and keeps planning until the plan has
nothing left to say. What it decides it writes to Redis first and tells the processes
after, in the answers to their heartbeats.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from headway.errors import Conflict, HeadwayError, NoCapacity, Unavailable
from headway.jobs import JobRecord, check_job_id
from headway.jobspec import JobSpec
from headway.journal import Journal
from headway.patience import woken
from headway.telemetry import get_logger
from headway.waits import Wait
from services.coordinator.decisions import Cancel, Change, Event
from services.coordinator.fleet import FleetRegistry, JobReport, Node
from services.coordinator.meters import count_event, show_fleet, show_redis
from services.coordinator.scheduler import missing_for, plan
from services.coordinator.store import JobStore

log = get_logger(__name__)

RECONCILE_INTERVAL_S = 0.5
_MAX_PASSES = 20  # of the plan in one go; each makes the fleet's wishes fewer


@dataclass(frozen=True, slots=True)
class Work:
    """What one process should do for one job."""

    job_id: str
    spec_json: str
    cancel: bool
    attempt: int
    reward_addresses: tuple[str, ...]


class Coordinator:
    """Submits, cancels, schedules. All methods run on one event loop."""

    def __init__(self, store: JobStore, registry: FleetRegistry) -> None:
        self.store = store
        self.registry = registry
        self.healthy = False  # Redis answered at the last try
        self._active: dict[str, JobRecord] = {}
        self._loaded = False
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()

    # -- for users ---------------------------------------------------------------

    async def submit(
        self, spec: JobSpec, job_id: str | None, key: str | None, queue: bool
    ) -> tuple[JobRecord, bool]:
        """Adds a job, or finds it: same id (or key) and same spec is the same job.

        Conflict when the id or key stands for another spec; NoCapacity when the fleet
        could not run the job even were it idle, unless `queue`.
        """
        digest = spec.digest()
        known = await self.store.keyed_job(key) if key else None
        if known is not None:
            self._same_key(known, job_id, digest)
            job_id = known[0]
        if job_id is not None:
            existing = await self.store.find(check_job_id(job_id))
            if existing is not None:
                return self._same_body(existing, digest), False
        if not queue and (missing := missing_for(spec.rollout.min_nodes, self.registry.nodes())):
            raise NoCapacity(f"the fleet lacks {missing}; start it, or submit with queue=true")
        if key and known is None:
            wanted = job_id or _generated_id(spec)
            known = await self.store.claim_key(key, wanted, digest)
            self._same_key(known, job_id, digest)
            job_id = known[0]
        return await self._create(spec, job_id, digest)

    async def cancel(self, job_id: str) -> JobRecord:
        """Asks for a job's end. Conflict when it has succeeded or failed."""
        record = await self._apply(job_id, Cancel(job_id).apply)
        self._wake.set()
        return record

    def remembered(self, job_id: str) -> JobRecord | None:
        """An active job as it was at the last planning; for when Redis is away."""
        return self._active.get(job_id)

    def journal(self, job_id: str) -> Journal:
        """A job's events and metrics."""
        return Journal(self.store.redis, job_id)

    # -- for the fleet -----------------------------------------------------------

    async def register(self, node: Node) -> None:
        """Adds a process. One that was restarted under its old name loses its work first."""
        if self.registry.restarted(node):
            log.warning("%s registers as a new process", node.node_id)
            self.registry.leave(node.node_id)
            await self.reconcile()
        self.registry.register(node, time.monotonic())
        log.info("%s %s registered", node.role, node.node_id, extra={"address": node.address})

    async def heartbeat(
        self,
        node_id: str,
        reports: tuple[JobReport, ...],
        draining: bool,
        waits: tuple[Wait, ...] = (),
    ) -> list[Work] | None:
        """Takes a heartbeat in; what the process should do, or None when it is unknown.

        Unavailable while Redis is: the process then goes on as it is.
        """
        news = self.registry.beat(node_id, reports, draining, time.monotonic(), waits)
        if news is None:
            return None
        if news or not self._loaded:
            await self.reconcile()
        if not self.healthy:
            raise Unavailable("the coordinator cannot reach Redis")
        return self._work_of(node_id)

    async def leave(self, node_id: str) -> None:
        """Takes a process out; its work is given to others."""
        if self.registry.leave(node_id):
            log.info("%s left", node_id)
            await self.reconcile()

    # -- the loop ----------------------------------------------------------------

    async def run(self) -> None:
        """Reconciles every half second and whenever something changed, for ever."""
        while True:
            try:
                await self.reconcile()
            except HeadwayError:
                log.debug("no planning while Redis is away")  # said aloud when it began
            await woken(self._wake, RECONCILE_INTERVAL_S)
            self._wake.clear()

    async def reconcile(self) -> None:
        """Plans and applies until the plan is empty; an error when Redis cannot be used."""
        async with self._lock:
            try:
                await self._reconcile()
            except HeadwayError as error:
                if self.healthy:
                    log.error("%s", error)
                self.healthy = False
                show_redis(False)
                raise
            if not self.healthy:
                log.info("Redis answers")
            self.healthy = True
            show_redis(True)

    async def _reconcile(self) -> None:
        for _ in range(_MAX_PASSES):
            jobs = await self.store.active()
            now = time.monotonic()
            if not self._loaded:
                # After a restart the records know nodes that have yet to say hello.
                names = {n for j in jobs for n in (j.learner, *j.rollouts) if n is not None}
                self.registry.expect(names, now)
                self._loaded = True
            for node_id in self.registry.expire(now):
                log.warning("%s fell silent and counts as lost", node_id)
            self._active = {job.job_id: job for job in jobs}
            decisions = plan(jobs, self.registry.nodes(), self.registry.expected())
            if not decisions:
                show_fleet(jobs, self.registry.nodes())
                return
            for decision in decisions:
                await self._apply(decision.job_id, decision.apply)
        log.error("planning does not settle; the last decisions were %s", decisions)

    async def _apply(
        self, job_id: str, decide: Callable[[JobRecord, float], Change | None]
    ) -> JobRecord:
        record, change = await self.store.update(job_id, lambda old: decide(old, time.time()))
        if change is not None:
            await self._log(job_id, change.events)
        return record

    async def _log(self, job_id: str, events: tuple[Event, ...]) -> None:
        journal = self.journal(job_id)
        for event in events:
            log.info("%s", event.message, extra={"job_id": job_id, "event": event.kind})
            await journal.append_event(event.kind, event.message, **event.fields)
            count_event(event.kind)

    async def _create(
        self, spec: JobSpec, job_id: str | None, digest: str
    ) -> tuple[JobRecord, bool]:
        while True:
            now = time.time()
            wanted = job_id or _generated_id(spec)
            plain = spec.model_dump(mode="json")
            record, new = await self.store.create(JobRecord(wanted, plain, digest, now, now))
            if new:
                submitted = Event("submitted", f"submitted: {spec.name}", {"digest": digest})
                await self._log(wanted, (submitted,))
                self._wake.set()
                return record, True
            if job_id is not None:
                return self._same_body(record, digest), False
            # A generated id that is taken says nothing about this job: draw another.

    def _work_of(self, node_id: str) -> list[Work]:
        rewards = tuple(n.address for n in self.registry.nodes() if n.role == "reward")
        return [
            Work(job.job_id, _spec_json(job), job.state == "cancelling", job.attempt, rewards)
            for job in self._active.values()
            if node_id == job.learner or node_id in job.rollouts
        ]

    @staticmethod
    def _same_body(record: JobRecord, digest: str) -> JobRecord:
        if record.body_digest != digest:
            raise Conflict(f"job {record.job_id} exists with another specification")
        return record

    @staticmethod
    def _same_key(known: tuple[str, str], job_id: str | None, digest: str) -> None:
        if known[1] != digest or job_id not in (None, known[0]):
            raise Conflict(f"this Idempotency-Key was used for another request (job {known[0]})")


def _generated_id(spec: JobSpec) -> str:
    return f"{spec.name}-{secrets.token_hex(3)}"


def _spec_json(job: JobRecord) -> str:
    return json.dumps(job.spec, sort_keys=True, separators=(",", ":"))
