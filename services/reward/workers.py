"""The pool: warm worker processes, each fed by one task from one fair queue.

A slot consumes batches, produces one Score an item, and is unblocked by the queue.
An item that hangs, crashes or eats memory costs its worker; the rest of its batch
goes back to the head of the queue. An item is charged with a crash only when it
crashes a second, fresh worker: the first kill may have come from outside.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import Unavailable
from headway.messages import Score
from headway.telemetry import get_logger
from services.reward import metrics
from services.reward.pace import Pace
from services.reward.waiting import Batch, FairQueue, Unfinished, Unit
from services.reward.worker import Worker, WorkerDied

log = get_logger(__name__)
_MAX_FAILED_STARTS = 3
_MAX_FAILED_RESTARTS = 12  # what came up once was killed from outside, or the machine is full
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_MAX_FAILED_PREPARATIONS = 2
_MAX_CRASHES = 2  # then the item is blamed: the first may have been an accident
_MAX_KILLS = 8  # a signal from outside is rarely the item's doing, unless memory ran out each time
_RETRIED_BATCH = 8  # what a failure left over is shared out finely: it may hold more of the kind
_PATIENT_FROM = 4  # answers to come: read several at a time


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Size and limits of the pool."""

    num_workers: int = 2
    memory_bytes: int = 2 << 30  # address space of one worker
    items_per_worker: int = 20_000  # then it is replaced, against slow leaks
    start_timeout_s: float = 60.0  # also for loading what a grader needs
    imports: tuple[str, ...] = ()  # modules that every worker loads at its start
    trust_functions: bool = False  # run users' functions outside the sandbox where they ask for it


class WorkerPool:
    """Scores batches in killable processes."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._pace = Pace()
        self._queue = FairQueue(self._pace.num_items)
        self._workers: dict[int, Worker] = {}

    @property
    def num_ready(self) -> int:
        """Workers that are loaded."""
        return sum(worker.alive for worker in self._workers.values())

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.pid for worker in self._workers.values())

    def submit(self, batch: Batch) -> None:
        """Queues a batch; every item of it is delivered once, unless nobody wants it any more."""
        self._queue.put(batch)

    async def start(self) -> None:
        """Brings all workers up. Unavailable when they do not come."""
        await asyncio.gather(*(self._replace(slot, "start") for slot in range(self.num_workers)))

    async def run(self) -> None:
        """Feeds the workers until cancelled; kills them at the end."""
        try:
            async with asyncio.TaskGroup() as group:
                for slot in range(self.num_workers):
                    group.create_task(self._feed(slot), name=f"worker-{slot}")
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Kills all workers."""
        workers, self._workers = list(self._workers.values()), {}
        await asyncio.gather(*(worker.stop() for worker in workers))

    @property
    def num_workers(self) -> int:
        """Workers that the pool is to have."""
        return self._settings.num_workers

    async def _feed(self, slot: int) -> None:
        while True:
            batch = await self._queue.get()
            if not self._workers[slot].alive:
                await self._replace(slot, "died")
            worker = self._workers[slot]
            waited_s = time.monotonic() - batch.queued_at
            metrics.QUEUE_SECONDS.labels(batch.grader["type"]).observe(waited_s)
            scored, turn = worker.num_scored, _Round(worker, batch, self._settings.start_timeout_s)
            reason, left = await turn.play()
            self._measure(batch, turn.spent_s(), worker.num_scored - scored)
            if left is not None:
                self._queue.put_back(left, _RETRIED_BATCH)
            if not reason and worker.num_scored >= self._settings.items_per_worker:
                reason = "recycled"
            if reason:
                await self._replace(slot, reason)

    def _measure(self, batch: Batch, spent_s: float, num_scored: int) -> None:
        if num_scored or spent_s >= batch.timeout_s:
            self._pace.measured(batch.job_id, batch.grader["type"], spent_s / max(num_scored, 1))

    async def _replace(self, slot: int, reason: str) -> None:
        old = self._workers.pop(slot, None)
        if old is not None:
            await old.stop()
        at_most = _MAX_FAILED_STARTS if reason == "start" else _MAX_FAILED_RESTARTS
        for attempt in range(1, at_most + 1):
            try:
                settings = self._settings
                self._workers[slot] = await Worker.start(
                    settings.memory_bytes,
                    settings.imports,
                    ["--trust-functions"] if settings.trust_functions else [],
                    settings.start_timeout_s,
                )
            except (WorkerDied, TimeoutError, OSError) as error:
                log.warning("start %d of grader worker %d failed: %s", attempt, slot, error)
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S))
                continue
            metrics.WORKER_STARTS.labels(reason).inc()
            return
        raise Unavailable(
            f"no grader worker came up in {at_most} attempts; its own error stands above"
            f" (its memory limit is {self._settings.memory_bytes >> 20} MiB)"
        )


class _Round:
    """One batch on one worker."""

    def __init__(self, worker: Worker, batch: Batch, prepare_timeout_s: float) -> None:
        self._worker = worker
        self._batch = batch
        self._prepare_timeout_s = prepare_timeout_s
        self._prepared_at: float | None = None

    def spent_s(self) -> float:
        """Seconds since the grader was loaded."""
        return 0.0 if self._prepared_at is None else time.monotonic() - self._prepared_at

    async def play(self) -> tuple[str, Batch | None]:
        """Why the worker must be replaced (empty: it is fine), and what is left to score."""
        try:
            await self._worker.send(self._batch)
            answer = await self._worker.answer(self._prepare_timeout_s)
        except TimeoutError:
            self._fail_all("timeout", "the grader did not load in time")
            return "timeout", None
        except WorkerDied as error:
            most = await self._most_deaths(_MAX_FAILED_PREPARATIONS + 1)
            return "crash", self._after_failed_preparation(error, most)
        if "prepared" not in answer:
            kind, message = answer.get("kind"), answer.get("unusable")
            self._fail_all(str(kind or "internal"), str(message or "the grader did not load"))
            return "", None
        self._prepared_at = time.monotonic()
        for done in range(len(self._batch.units)):
            if self._batch.interest.cancelled:
                return "cancelled", None
            reason, kept = await self._one(done)
            if reason:
                return reason, self._rest(done if kept else done + 1, kept)
        return "", None

    async def _one(self, done: int) -> tuple[str, bool]:
        """Scores one unit: why the worker must go, and whether the unit is to be tried again."""
        unit = self._batch.units[done]
        what = "item" if len(unit) == 1 else f"group of {len(unit)}"
        limit_s = self._batch.timeout_s * len(unit)
        started = time.perf_counter()
        try:
            patient = len(self._batch.units) - done >= _PATIENT_FROM
            scores = await self._scores(len(unit), limit_s, patient)
        except TimeoutError:
            of_group = f", the limit of a {what}" if len(unit) > 1 else ""
            self._fail(unit, "timeout", f"not scored within {limit_s:g} s{of_group}", started)
            return "timeout", False
        except WorkerDied:
            deaths = self._batch.deaths.get(unit, 0) + 1
            if deaths < await self._most_deaths(_MAX_CRASHES):
                return "crash", True
            times = "twice" if deaths == _MAX_CRASHES else f"{deaths} times"
            self._fail(unit, "crash", f"the {what} ended its worker process {times}", started)
            return "crash", False
        self._worker.num_scored += len(unit)
        if self._batch.ask is not None and any(isinstance(s, Unfinished) for s in scores):
            self._batch.ask(unit, scores)
            return "", False
        for (position, _), score in zip(unit, scores, strict=True):
            self._batch.deliver(position, _finished(score))
        out_of_memory = any(isinstance(s, Score) and s.error_kind == "memory" for s in scores)
        return ("memory" if out_of_memory else ""), False

    async def _scores(
        self, num_items: int, limit_s: float, patient: bool
    ) -> list[Score | Unfinished]:
        """The results of one unit, all within its limit."""
        if num_items == 1:
            return [_score(await self._worker.answer(limit_s, patient))]
        deadline = time.perf_counter() + limit_s
        scores: list[Score | Unfinished] = []
        for _ in range(num_items):
            left_s = deadline - time.perf_counter()
            scores.append(_score(await self._worker.answer(left_s)))
        return scores

    def _rest(self, first: int, kept: bool) -> Batch | None:
        units = self._batch.units[first:]
        deaths = dict(self._batch.deaths)
        if kept:
            deaths[units[0]] = deaths.get(units[0], 0) + 1
        return replace(self._batch, units=units, deaths=deaths) if units else None

    async def _most_deaths(self, crashes: int) -> int:
        """How many workers may die before what they had is blamed."""
        return _MAX_KILLS if await self._worker.was_killed() else crashes

    def _after_failed_preparation(self, error: WorkerDied, most: int) -> Batch | None:
        failures = self._batch.num_failed_preparations + 1
        if failures >= most:
            self._fail_all("crash", f"the grader's worker ended while loading: {error}")
            return None
        return replace(self._batch, num_failed_preparations=failures)

    def _fail_all(self, kind: str, message: str) -> None:
        for unit in self._batch.units:
            for position, _ in unit:
                self._batch.deliver(position, Score(None, {}, kind, message))

    def _fail(self, unit: Unit, kind: str, message: str, started: float) -> None:
        share_s = (time.perf_counter() - started) / len(unit)
        for position, _ in unit:
            self._batch.deliver(position, Score(None, {}, kind, message, share_s))


def _finished(score: Score | Unfinished) -> Score:
    if isinstance(score, Score):
        return score
    return Score(None, {}, "internal", "the grader asks outside, which its service cannot")


def _score(answer: dict[str, Any]) -> Score | Unfinished:
    duration_s = float(answer.get("duration_s", 0.0))
    if "needs" in answer:
        return Unfinished(answer["needs"], answer["kept"], duration_s)
    if "reward" in answer:
        return Score(answer["reward"], answer["parts"], "", "", duration_s)
    return Score(None, {}, answer["error"], answer["message"], duration_s)
