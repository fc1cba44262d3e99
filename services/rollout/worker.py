"""One job on one node: claim -> generate -> score -> deliver, many tickets at once.

    claim loop ──> sampling (at most `slots`) ──> scoring (bounded) ──> delivered
                        │ lost lease: stopped at once     │
    renew loop ─────────┴─────────────────────────────────┘
    announce loop: a member of the job, until it is stopped

Consumes tickets, produces groups. The claim loop waits for a free slot, for the first
weights, or, when the ledger refuses, for a moment; a freed slot and an install wake it.
A Redis that is away stops nothing that runs: every call is made again until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from headway.errors import HeadwayError, WeightMismatch
from headway.jobspec import JobSpec
from headway.ledger.api import ClaimResult, Lease, Ledger
from headway.patience import patiently, woken
from headway.telemetry import get_logger
from headway.waits import Wait
from services.rollout.desk import Desk
from services.rollout.engine import Engine
from services.rollout.held import Held, Key, Standing, room, waits_of
from services.rollout.presence import Presence, WorkerSettings
from services.rollout.scoring import Scores
from services.rollout.tickets import OUTCOMES, EventLog, TicketWork

log = get_logger(__name__)
_REFUSED_CLAIMS_PER_S = 40.0
_LEAVE_S = 5.0  # for giving leases back when a job is left; then they expire


class JobRunner:
    """Serves one job until `stop`, or until it fails; `run` is its one task."""

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        settings: WorkerSettings,
        engine: Engine,
        ledger: Ledger,
        scores: Scores,
        events: EventLog,
        room: Callable[[str], Ledger] | None = None,
    ) -> None:
        """`room` opens a ledger that the job has beside its own, by name."""
        self._job_id = job_id
        self._spec = spec
        self._settings = settings
        self._engine = engine
        self._ledger = ledger
        self._desk = Desk(job_id, spec, settings, engine, ledger, scores, events, self._fail, room)
        self._held: dict[Key, Held] = {}
        self._standing = Standing(_now())
        self._wake = asyncio.Event()  # the claim loop has a reason to look again
        self._presence = Presence(settings, engine, ledger, self._standing)
        self._let_go = asyncio.Event()  # a ticket is held no longer
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: asyncio.TaskGroup | None = None
        self._claiming: asyncio.Task[None] | None = None

    @property
    def version(self) -> int | None:
        """The version installed for this job; None before the first and after a failed one."""
        return self._standing.version

    @property
    def num_tickets(self) -> int:
        """Tickets held."""
        return len(self._held)

    def waits(self) -> list[Wait]:
        """What the node waits for at this moment."""
        return waits_of(self._held.values(), self._standing, self._job_id, _now())

    # -- told by the node

    def installed(self, version: int) -> None:
        """New weights sample: claims are made at their version from now on."""
        self._standing.installed(version, _now())
        self._desk.turn_to(version)
        self._wake.set()
        self._presence.tell()

    def install_failed(self, error: HeadwayError) -> None:
        """Nothing samples until a later install. A mismatch is the end: no later one would fit."""
        self._standing.broke(_now())
        self._presence.tell()
        if isinstance(error, WeightMismatch):
            self._fail(error)

    async def stop(self, drain_s: float) -> None:
        """Claims no more, waits up to `drain_s` for what is under way, gives the rest back.

        `run` returns soon after.
        """
        self._standing.drains(_now())
        self._wake.set()
        self._presence.tell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                if self._claiming is not None:
                    await asyncio.wait({self._claiming})
                while self._held and not self._end.done():
                    self._let_go.clear()
                    await self._let_go.wait()
        if not self._end.done():
            self._end.set_result(None)

    async def run(self) -> None:
        """Serves the job; raises what made that impossible. Leases are given back at the end."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._claiming = tasks.create_task(self._ended_by(self._claim_loop()), name="claim")
                loops = [
                    self._claiming,
                    tasks.create_task(self._ended_by(self._renew_loop()), name="renew"),
                    tasks.create_task(
                        self._ended_by(self._presence.run(self._end.done)), name="announce"
                    ),
                ]
                await asyncio.shield(self._end)
                for task in (*loops, *(h.task for h in self._held.values() if h.task)):
                    task.cancel()
        except BaseExceptionGroup as group:
            # what ended it, rather than what broke in the ending
            cause = self._end.exception() if self._end.done() else None
            raise cause or _first(group) from group
        finally:
            await self._leave()

    # -- the loops. Each looks at `_end` itself: the Redis client may swallow a cancellation.

    async def _claim_loop(self) -> None:
        pause_s = self._settings.first_backoff_s
        while not self._standing.draining and not self._end.done():
            self._wake.clear()
            version = self._standing.version
            asked, granted, full = 0, 0, True
            for work in self._desk.works if version is not None else ():
                if (free := self._room(work)) > 0 and version is not None:
                    claimed = await self._claim(work, version, free)
                    asked, granted = asked + 1, granted + len(claimed.leases)
                    full = full and len(claimed.leases) == free
                if self._desk.comes_first(work):
                    break  # the room that it needs is not filled with other tickets
            if not asked:
                await self._wake.wait()
                continue
            if granted and full:
                continue
            if granted or await woken(self._wake, pause_s):
                pause_s = self._settings.first_backoff_s
            else:
                pause_s = min(2 * pause_s, self._longest_pause_s())

    def _longest_pause_s(self) -> float:
        """Between claims that are refused: so that a whole fleet asks about so often a second."""
        fair_s = self._presence.num_members / _REFUSED_CLAIMS_PER_S
        return max(self._settings.first_backoff_s, min(fair_s, self._settings.max_backoff_s))

    async def _claim(self, work: TicketWork, version: int, room: int) -> ClaimResult:
        portion = work.portion(room, self._presence.num_members)
        claimed = await patiently(lambda: work.claim(version, portion))
        for lease in claimed.leases:
            if work.source.pinned in (None, self._standing.version):
                self._begin(work, lease)
            else:  # other weights came in the meantime
                await work.release(lease)
        if work is self._desk.own:
            self._standing.answered(claimed.refusal, _now())
        self._desk.answered(work, claimed.refusal)
        if claimed.refusal == "closed":
            await self._give_back("its work has ended", work)
        return claimed

    async def _renew_loop(self) -> None:
        while not self._end.done():
            await asyncio.sleep(self._spec.rollout.lease_s / 3)
            await self._give_back_what_stands_still()
            if self._held:
                await self._renew(dict(self._held))

    async def _renew(self, held: dict[Key, Held]) -> None:
        kept: set[Key] = set()
        for work in {entry.work for entry in held.values()}:
            leases = [entry.lease for entry in held.values() if entry.work is work]
            kept |= {(work.source.name, lease.token) for lease in await work.renew(leases)}
        for key in (held.keys() - kept) & self._held.keys():  # others were delivered meanwhile
            entry = held[key]
            log.warning("a lease was lost; its work stops", extra=entry.work.names(entry.lease))
            OUTCOMES.labels("lease_lost").inc()
            self._drop(entry)

    # -- tickets

    def _room(self, work: TicketWork) -> int:
        share = work.share(self._presence.num_members)
        return room(self._held.values(), self._spec.rollout.max_num_seqs, work, share)

    def _begin(self, work: TicketWork, lease: Lease) -> None:
        assert self._tasks is not None
        held = Held(lease, work, _now())
        self._held[held.key] = held
        if self._end.done():
            return  # it was claimed while the end came: `_leave` gives it back
        task = self._ended_by(self._work(held))
        held.task = self._tasks.create_task(task, name=f"ticket-{lease.token}")

    async def _work(self, held: Held) -> None:
        sampled = await held.work.generate(held.lease)
        held.sampled_at = _now()
        generate_s = held.sampled_at - held.claimed_at
        self._wake.set()
        if sampled is not None:
            await held.work.score_and_deliver(held.lease, sampled, generate_s)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        self._held.pop(held.key, None)
        self._wake.set()
        self._let_go.set()

    def _drop(self, held: Held) -> None:
        if held.task is not None:
            held.task.cancel()
        self._forget(held)

    async def _give_back_what_stands_still(self) -> None:
        """After a broken install, tickets go back when no later one comes in good time."""
        grace_s = 2 * self._spec.rollout.update_timeout_s
        if not self._standing.broken or _now() - self._standing.since < grace_s:
            return
        await self._give_back("no weights came")

    async def _give_back(self, why: str, work: TicketWork | None = None) -> None:
        """Stops all sampling, or a work's; what is sampled is still scored and delivered."""
        for held in [held for held in self._held.values() if held.sampling]:
            if work is not None and held.work is not work:
                continue
            log.warning("a ticket is given back: %s", why, extra=held.work.names(held.lease))
            self._drop(held)
            await held.work.release(held.lease)

    # -- the end

    async def _leave(self) -> None:
        """Gives back what is still held. What Redis does not hear in time expires by itself."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                for held in list(self._held.values()):
                    await held.work.release(held.lease)
                await self._ledger.withdraw(self._settings.node_id)
        except (HeadwayError, TimeoutError) as error:
            log.warning("leases are left to expire: %s", error, extra={"job_id": self._job_id})
        self._held.clear()

    async def _ended_by(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one of the tasks; what it raises ends them all."""
        try:
            await work
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        if not self._end.done():
            self._end.set_exception(error)
        self._let_go.set()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _now() -> float:
    return asyncio.get_running_loop().time()
