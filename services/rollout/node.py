"""A rollout node: follows its assignment, keeps an engine, has a lane for control.

What it should do arrives whole with every heartbeat (`reconcile`); `run` brings what it
does into line, one change at a time. Weight calls go straight to the engine: they wait
for each other, never for claims, generations or scores.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial

from redis.asyncio import Redis

from headway.access.reach import allowed_roots, check_reach
from headway.errors import (
    Conflict,
    HeadwayError,
    NotFound,
    Unavailable,
    WeightMismatch,
)
from headway.jobspec import JobSpec, parse_job
from headway.journal import Journal
from headway.ledger.redis_ledger import RedisLedger
from headway.messages import EpochInvite, InstallReport, WeightManifest
from headway.pb import fleet_pb2
from headway.reward_client import RewardClient
from headway.telemetry import get_logger
from headway.waits import Wait
from headway.weights.snapshot import snapshot_at_hand
from services.rollout.engine import Engine
from services.rollout.engines import EngineKeeper, EngineSettings
from services.rollout.lane import Lane
from services.rollout.post import Phase, Post, check_seat, same_work
from services.rollout.presence import WorkerSettings
from services.rollout.visits import Policy, Visits
from services.rollout.worker import JobRunner

log = get_logger(__name__)
_HANDOVER_S = 1.0  # when a job is taken away: for groups that are all but delivered


class RolloutNode:
    """Serves one job at a time. `on_change` is called when a status has changed."""

    def __init__(
        self,
        worker: WorkerSettings,
        engine: EngineSettings,
        redis: Redis,
        on_change: Callable[[], None] = lambda: None,
        visits: Visits | None = None,
    ) -> None:
        self.worker = worker
        self._visits = visits or Visits(0, 1)
        self._engines = EngineKeeper(engine)
        self._redis = redis
        self.on_change = on_change
        self._wanted: fleet_pb2.Assignment | None = None
        self._post: Post | None = None
        self._look = asyncio.Event()
        self._lane = Lane()
        self.draining = False

    # -- the fleet

    async def reconcile(self, assignments: Sequence[fleet_pb2.Assignment]) -> None:
        """Takes in the whole desired state; `run` follows it."""
        current = self._post.job_id if self._post is not None else ""
        ours = [a for a in assignments if a.job_id == current] or list(assignments)
        self._wanted = ours[0] if ours else None
        if self._post is not None and self._wanted is not None:
            self._post.scores.update_addresses(self._wanted.reward_addresses)
        self._look.set()

    def statuses(self) -> list[fleet_pb2.JobStatus]:
        """Where the job stands here."""
        post = self._post
        if post is None:
            return []
        return [
            fleet_pb2.JobStatus(
                job_id=post.job_id,
                phase=post.phase,
                detail=post.detail,
                version=post.runner.version if post.runner is not None else None,
                error_kind=post.error_kind,
            )
        ]

    def waits(self) -> list[Wait]:
        """What the node waits for at this moment."""
        post = self._post
        if post is None or post.phase == "failed":
            return []
        if post.runner is None:
            waited_s = asyncio.get_running_loop().time() - post.began_at
            return [Wait("engine", post.detail, waited_s, post.job_id)]
        return post.runner.waits()

    async def run(self) -> None:
        """Brings what the node does into line with what it should do, for ever."""
        while True:
            await self._look.wait()
            self._look.clear()
            if not self.draining:
                await self._converge()

    async def drain(self, deadline_s: float) -> None:
        """Claims nothing more, finishes or gives back what it holds, ends the engine."""
        self.draining = True
        seen_off = self._visits.close("the node is ending", deadline_s)
        if self._post is not None:
            await asyncio.gather(seen_off, self._stop(self._post, deadline_s))
        else:
            await seen_off
        await self._engines.discard()

    async def _converge(self) -> None:
        post, wanted = self._post, self._wanted
        if post is not None and not same_work(post, wanted):
            await self._stop(post, _HANDOVER_S)
            self._post = post = None
        if wanted is None:
            return
        if post is None:
            post = self._post = Post(wanted, RewardClient(wanted.reward_addresses))
            if not wanted.cancel:
                post.task = asyncio.create_task(self._serve(post), name=f"job-{wanted.job_id}")
        if wanted.cancel and post.phase != "cancelled":
            await self._stop(post, 0.0)
            self._set(post, "cancelled", "")

    async def _serve(self, post: Post) -> None:
        """One job from the engine's start to its end on this node; errors become its status."""
        try:
            spec = parse_job(json.loads(post.assignment.spec_json))
            check_reach(spec, allowed_roots())
            await self._visits.close(f"the node prepares for job {post.job_id}")
            post.engine = await self._engines.engine_for(spec)
            post.runner = runner = self._runner(post, spec, post.engine)
            held = partial(getattr, runner, "version")
            self._visits.open(Policy(post.job_id, spec.model.path, post.engine, held))
            self._set(post, "running", "")
            await runner.run()
        except HeadwayError as error:
            log.error("%s", error, extra={"job_id": post.job_id, "kind": error.kind})
            self._set(post, "failed", str(error), error.kind)
            await self._after_failure(post, error)
        except Exception as error:
            log.exception("serving the job failed", extra={"job_id": post.job_id})
            self._set(post, "failed", f"{type(error).__name__}: {error}", HeadwayError.kind)
            await self._after_failure(post, error)

    def _runner(self, post: Post, spec: JobSpec, engine: Engine) -> JobRunner:
        ledger = RedisLedger(self._redis, post.job_id)
        journal = Journal(self._redis, post.job_id)

        def room(name: str) -> RedisLedger:
            return RedisLedger(self._redis, post.job_id, name)

        return JobRunner(post.job_id, spec, self.worker, engine, ledger, post.scores, journal, room)

    async def _after_failure(self, post: Post, error: Exception) -> None:
        """A wrong weight says nothing about the engine; after anything else it is started anew."""
        await self._leave_group(post)
        if not isinstance(error, WeightMismatch):
            await self._visits.close(f"job {post.job_id} failed here")
            await self._engines.discard()

    async def _stop(self, post: Post, drain_s: float) -> None:
        if post.runner is not None:
            await post.runner.stop(drain_s)
        elif post.task is not None and post.phase == "starting":
            post.task.cancel()  # the engine's start goes on, for whoever needs it next
        if post.task is not None:
            await asyncio.wait({post.task})
        await self._leave_group(post)
        await post.scores.close()

    def _set(self, post: Post, phase: Phase, detail: str, error_kind: str = "") -> None:
        post.phase, post.detail, post.error_kind = phase, detail, error_kind
        self.on_change()

    # -- control

    async def join(self, invite: EpochInvite) -> None:
        """Takes a seat. NotFound: another job; Conflict: the epoch is past."""

        async def join() -> None:
            post, engine, _ = self._serving(invite.job_id)
            if post.invite == invite:
                return
            if post.invite is not None and invite.epoch <= post.invite.epoch:
                raise Conflict(
                    f"epoch {invite.epoch} of job {invite.job_id} is past:"
                    f" this node is in epoch {post.invite.epoch}"
                )
            post.invite = None
            await engine.join(invite)
            post.invite = invite

        await self._lane.run(join, invite.timeout_s)

    async def install(
        self, job_id: str, epoch: int, manifest: WeightManifest, timeout_s: float
    ) -> InstallReport:
        """Receives and installs a version. Conflict: another epoch than the one joined."""

        async def install() -> InstallReport:
            post, engine, runner = self._serving(job_id)
            if engine.transport == "broadcast":
                check_seat(post, epoch)
            try:
                report = await engine.install(manifest, timeout_s)
            except HeadwayError as error:
                runner.install_failed(error)
                raise
            runner.installed(report.version)
            return report

        return await self._lane.run(install, timeout_s)

    async def catch_up(
        self, job_id: str, manifest: WeightManifest, address: str, timeout_s: float
    ) -> InstallReport:
        """Fetches a version that others have, and installs it; needs no seat.

        The older version goes on sampling until then, and when the fetch fails.
        """
        post, _, _ = self._serving(job_id)
        shared = parse_job(json.loads(post.assignment.spec_json)).rollout.snapshot_dir

        async def install() -> InstallReport:
            _, engine, runner = self._serving(job_id)
            try:
                report = await engine.install_snapshot(manifest, path, timeout_s)
            except HeadwayError as error:
                if isinstance(error, WeightMismatch) or engine.version is None:
                    runner.install_failed(error)
                raise
            runner.installed(report.version)
            return report

        # not in the lane: a slow stream must hold up neither a drain nor other weight calls
        async with snapshot_at_hand(job_id, manifest, address, shared, timeout_s) as path:
            return await self._lane.run(install, timeout_s)

    async def leave(self, job_id: str) -> None:
        """Gives the seat up; safe to repeat."""
        post, _, _ = self._serving(job_id)
        await self._leave_group(post)

    @property
    def job_id(self) -> str:
        """The job it serves, or ""."""
        return self._post.job_id if self._post is not None else ""

    @property
    def version(self) -> int | None:
        """The version installed for the job."""
        post = self._post
        return post.runner.version if post is not None and post.runner is not None else None

    @property
    def num_tickets(self) -> int:
        """Tickets held."""
        post = self._post
        return post.runner.num_tickets if post is not None and post.runner is not None else 0

    @property
    def engine(self) -> Engine | None:
        """The running engine, if any."""
        return self._engines.engine

    def _serving(self, job_id: str) -> tuple[Post, Engine, JobRunner]:
        post = self._post
        if post is None or post.job_id != job_id:
            serves = f"job {post.job_id}" if post is not None else "no job"
            raise NotFound(f"node {self.worker.node_id} serves {serves}, not job {job_id}")
        if post.phase != "running" or post.engine is None or post.runner is None:
            raise Unavailable(f"job {job_id} is {post.phase} here: {post.detail}")
        return post, post.engine, post.runner

    async def _leave_group(self, post: Post) -> None:
        async def leave() -> None:
            post.invite = None
            if post.engine is not None:
                try:
                    await post.engine.leave()
                except HeadwayError as error:
                    log.warning("leaving the weight group: %s", error)

        await self._lane.run(leave, None)
