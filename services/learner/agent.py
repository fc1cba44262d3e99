"""The learner agent: makes the training processes match what the coordinator wants.

It trains one job at a time. Consumes assignments, produces statuses; holds no job
state that matters: a new agent resumes a job from its run folder and its ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from headway.access.reach import allowed_roots, check_reach
from headway.errors import HeadwayError, NotFound
from headway.jobs import ENDED
from headway.jobspec import JobSpec, parse_job
from headway.jobspec_eval import last_validated
from headway.ledger.keys import validation_room
from headway.ledger.redis_ledger import RedisLedger
from headway.lifecycle import end_tasks
from headway.pb import fleet_pb2
from headway.redis_client import connect
from headway.report import write_report
from headway.telemetry import get_logger
from headway.waits import REASONS, Reason, Wait
from services.learner.ranks import Ranks, RanksSpec
from services.learner.run_folder import RunFolder, run_path
from services.learner.status import Status
from services.learner.trainer_settings import TrainerSettings

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent is told at its start."""

    runs_dir: Path
    redis_url: str
    host: str
    cores: tuple[int, ...] = ()
    log_level: str = "info"
    trainer: TrainerSettings = field(default_factory=TrainerSettings)


@dataclass(slots=True)
class Work:
    """One job on this agent, under way or ended and not yet forgotten."""

    job_id: str
    attempt: int
    run_dir: Path
    spec: JobSpec | None = None  # None: refused
    ranks: Ranks | None = None
    task: asyncio.Task[None] | None = None
    status: Status = field(default_factory=Status)


class LearnerAgent:
    """Runs assigned jobs one after the other and says where they stand."""

    def __init__(self, settings: AgentSettings, changed: Callable[[], None]) -> None:
        """`changed` is called whenever a status is worth an early heartbeat."""
        self._settings = settings
        self._changed = changed
        self._works: dict[str, Work] = {}

    @property
    def current(self) -> Work | None:
        """The job under way."""
        return next((w for w in self._works.values() if w.task and not w.task.done()), None)

    async def reconcile(self, assignments: Sequence[fleet_pb2.Assignment]) -> None:
        """Starts, cancels and forgets jobs until they match; returns at once."""
        wanted = {a.job_id: a for a in assignments}
        for job_id, work in list(self._works.items()):
            if job_id not in wanted:
                self._drop(work)
            elif wanted[job_id].cancel:
                self._cancel(work)
        for job_id, assignment in wanted.items():
            known = self._works.get(job_id)
            if known is not None and (
                known.status.phase not in ENDED or known.attempt >= assignment.attempt
            ):
                continue
            if assignment.cancel:
                self._works[job_id] = self._refused(assignment, Status("cancelled", "cancelled"))
            elif self.current is None:
                self._begin(assignment)

    def statuses(self) -> list[fleet_pb2.JobStatus]:
        """Every job's status for the next heartbeat."""
        return [
            fleet_pb2.JobStatus(
                job_id=work.job_id,
                phase=work.status.phase,
                detail=work.status.detail,
                version=work.status.step,
                error_kind=work.status.error_kind,
                run_dir=str(work.run_dir),
            )
            for work in self._works.values()
        ]

    def waits(self) -> list[Wait]:
        """What the jobs' loops say they wait for."""
        now = time.time()
        return [
            Wait(
                cast(Reason, work.status.waiting),
                work.status.detail,
                now - work.status.waiting_since,
                work.job_id,
            )
            for work in self._works.values()
            if work.status.waiting in REASONS
        ]

    async def stop(self) -> None:
        """Kills the ranks; the jobs can be resumed by another agent."""
        await end_tasks(w.task for w in self._works.values() if w.task is not None)

    def _begin(self, assignment: fleet_pb2.Assignment) -> None:
        try:
            run_dir = run_path(self._settings.runs_dir, assignment.job_id).absolute()
            spec = parse_job(json.loads(assignment.spec_json))
            check_reach(spec, allowed_roots())
            RunFolder(run_dir).create(spec)
        except (HeadwayError, OSError, ValueError) as error:
            kind = error.kind if isinstance(error, HeadwayError) else "invalid"
            status = Status("failed", str(error), error_kind=kind)
            self._works[assignment.job_id] = self._refused(assignment, status)
            return
        work = Work(assignment.job_id, assignment.attempt, run_dir, spec)
        work.ranks = Ranks(self._ranks_spec(work, spec), lambda: self._moved(work))
        work.task = asyncio.create_task(self._work(work), name=f"job {work.job_id}")
        self._works[work.job_id] = work
        log.info("starting", extra={"job_id": work.job_id, "attempt": work.attempt})

    def _ranks_spec(self, work: Work, spec: JobSpec) -> RanksSpec:
        folder = RunFolder(work.run_dir)
        return RanksSpec(
            job_id=work.job_id,
            job_file=folder.job,
            run_dir=folder.path,
            log_file=folder.log,
            redis_url=self._settings.redis_url,
            host=self._settings.host,
            world=spec.actor.num_ranks,
            cores=self._settings.cores,
            log_level=self._settings.log_level,
            trainer=self._settings.trainer,
        )

    async def _work(self, work: Work) -> None:
        assert work.ranks is not None
        try:
            final = await work.ranks.run()
        except Exception as error:
            log.exception("the ranks could not be run", extra={"job_id": work.job_id})
            final = Status("failed", f"{type(error).__name__}: {error}", error_kind="internal")
        # Rank 0 does both when it can; a killed one cannot.
        await self._close_ledgers(work)
        with contextlib.suppress(HeadwayError, OSError):
            await asyncio.to_thread(write_report, work.run_dir)
        work.status = final
        log.info("job ended: %s", final.phase, extra={"job_id": work.job_id})
        self._changed()

    async def _close_ledgers(self, work: Work) -> None:
        """Closes the job's ledger, and that of a validation which was under way."""
        job_id, redis = work.job_id, connect(self._settings.redis_url)
        ledger = RedisLedger(redis, job_id)
        try:
            await ledger.close()
            committed = (await ledger.counts()).step
            for version in last_validated(work.spec, committed) if work.spec is not None else ():
                with contextlib.suppress(NotFound):
                    await RedisLedger(redis, job_id, validation_room(version)).close()
        except HeadwayError as error:
            log.warning("the ledger was not closed: %s", error, extra={"job_id": job_id})
        finally:
            await redis.aclose()

    def _moved(self, work: Work) -> None:
        """Passes the ranks' status on; an end only counts once the folder is complete."""
        assert work.ranks is not None
        if work.ranks.status.phase not in ENDED:
            before, work.status = work.status, work.ranks.status
            if before.phase != work.status.phase:
                self._changed()

    def _cancel(self, work: Work) -> None:
        if work.ranks is not None and work.task is not None and not work.task.done():
            work.ranks.cancel()

    def _drop(self, work: Work) -> None:
        """The coordinator no longer knows the job here: stop without ending it for others."""
        if work.task is not None and not work.task.done():
            work.task.cancel()
        del self._works[work.job_id]

    def _refused(self, assignment: fleet_pb2.Assignment, status: Status) -> Work:
        return Work(assignment.job_id, assignment.attempt, Path(), status=status)
