"""Scoring requests: check, admit, wait for, remember.

A request consumes room in a bounded queue and is answered when its last item is
scored. The same request id joins the evaluation that runs, or gets the remembered
answer. Work that nobody waits for any more is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from headway.errors import Conflict, DeadlineExceeded, InvalidSpec, TooMany, Unavailable
from headway.messages import Score
from headway.waits import Wait
from services.reward import metrics
from services.reward.cache import ScoreCache
from services.reward.checking import Verdict, accepted, verdict_of
from services.reward.evaluation import Evaluation
from services.reward.outside.lane import Lane
from services.reward.pace import Rate
from services.reward.request import Request, ServiceLimits, digest_of
from services.reward.workers import WorkerPool

_LONGEST_ID = 1024  # of a request or a job: they are kept as long as answers are
# When a full queue says to ask again; _HINT_S where nothing has been measured.
_SHORTEST_HINT_S, _HINT_S, _LONGEST_HINT_S = 0.1, 1.0, 60.0


class Scorer:
    """Answers requests with the pool's help."""

    def __init__(self, pool: WorkerPool, lane: Lane, limits: ServiceLimits) -> None:
        self._pool = pool
        self._lane = lane
        self._limits = limits
        self._known: OrderedDict[str, Evaluation] = OrderedDict()
        self._num_remembered = 0
        self._cache = ScoreCache(limits.max_cached, limits.max_cached_bytes)
        self._rate = Rate(time.monotonic)
        self._queued_items = 0
        self._queued_bytes = 0
        self._running: set[Evaluation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def score(self, request: Request, deadline_s: float | None = None) -> tuple[Score, ...]:
        """One score an item, in order.

        InvalidSpec for a faulty grader or request, Conflict for a request id used for
        something else, TooMany when the queue is full, DeadlineExceeded.
        """
        outcome = "error"
        try:
            evaluation = self._find(request) or self._begin(request)
            limit_s = self._limits.max_request_s
            scores = await self._wait(evaluation, min(deadline_s or limit_s, limit_s))
            outcome = "ok"
            return scores
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except (InvalidSpec, Conflict, TooMany, DeadlineExceeded) as error:
            outcome = error.kind
            raise
        finally:
            metrics.REQUESTS.labels(outcome).inc()

    def validate(self, grader_json: str, item: Mapping[str, Any] | None) -> Verdict:
        """What a request with this grader would come to, and an item of the data with it."""
        limit_s = self._limits.max_item_timeout_s
        return verdict_of(grader_json, item, limit_s, self._lane.leaves)

    def waits(self) -> list[Wait]:
        """Its oldest request of each job, and how much is queued behind it."""
        now = asyncio.get_running_loop().time()
        oldest: dict[str, Evaluation] = {}
        for evaluation in self._running:
            known = oldest.setdefault(evaluation.job_id, evaluation)
            if evaluation.began_at < known.began_at:
                oldest[evaluation.job_id] = evaluation
        outside = self._lane.waits()
        return [
            Wait(
                "queue",
                f"scores {self._queued_items} items of {len(self._running)} requests with"
                f" {self._pool.num_ready} workers; the oldest has {evaluation.num_left} of"
                f" {evaluation.num_items} items left ({evaluation.kind})"
                + (f"; {outside}" if outside else ""),
                now - evaluation.began_at,
                job_id,
            )
            for job_id, evaluation in oldest.items()
        ]

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits for what runs, but not for ever."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for evaluation in list(self._running):
                evaluation.cancel()

    def _find(self, request: Request) -> Evaluation | None:
        known = self._known.get(request.request_id) if request.request_id else None
        if known is None:
            return None
        if known.digest != digest_of(request):
            raise Conflict(
                f"request_id {request.request_id!r} was used for another request: choose a new one"
            )
        self._known.move_to_end(request.request_id)
        return known

    def _begin(self, request: Request) -> Evaluation:
        if self.draining:
            raise Unavailable("the reward service is stopping: ask another one")
        limits = self._limits
        for name, text in (("request_id", request.request_id), ("job_id", request.job_id)):
            if len(text) > _LONGEST_ID:
                raise InvalidSpec(f"{name} has {len(text)} characters, and at most {_LONGEST_ID}")
        grader = accepted(request.grader_json, limits.max_item_timeout_s)
        timeout_s = grader.timeout_s or limits.item_timeout_s
        leaves = self._lane.leaves(grader)
        size = sum(item.size for item in request.items)
        self._check_size(len(request.items), size)
        evaluation = Evaluation(self, request, grader.type, size)
        if request.request_id:
            self._known[request.request_id] = evaluation
        self._running.add(evaluation)
        self._queued_items += evaluation.num_items
        self._queued_bytes += size
        self._idle.clear()
        self._rate.busy()
        metrics.QUEUED_ITEMS.set(self._queued_items)
        evaluation.use(self._cache.of(grader))
        evaluation.submit(self._pool, grader, timeout_s, limits, self._lane, leaves)
        return evaluation

    def _check_size(self, num_items: int, size: int) -> None:
        limits = self._limits
        if num_items > limits.max_items:
            raise InvalidSpec(f"{num_items} items: one request takes at most {limits.max_items}")
        if size > limits.max_request_bytes:
            raise InvalidSpec(f"{size} bytes: one request takes {limits.max_request_bytes}")
        beyond = self._queued_items + num_items - limits.max_queued_items
        beyond_bytes = self._queued_bytes + size - limits.max_queued_bytes
        if self._running and (beyond > 0 or beyond_bytes > 0):
            share = self._queued_items * min(1.0, max(0, beyond_bytes) / (self._queued_bytes or 1))
            hint_s = self._hint_s(max(beyond, share))
            raise TooMany(
                f"{self._queued_items} items wait for a grader worker and {num_items} more do not"
                f" fit: try again in {hint_s:.1f} s, or start another reward service",
                hint_s,
            )

    def _hint_s(self, num_items: float) -> float:
        """Seconds until so many items have been scored, as measured."""
        rate = self._rate.per_s()
        hint_s = num_items / rate if rate else _HINT_S
        return min(max(hint_s, _SHORTEST_HINT_S), _LONGEST_HINT_S)

    def delivered(self) -> None:
        """Called for each item that is scored."""
        self._queued_items -= 1
        self._rate.finished()

    async def _wait(self, evaluation: Evaluation, timeout_s: float) -> tuple[Score, ...]:
        evaluation.num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(evaluation.future)
        except TimeoutError:
            raise DeadlineExceeded(f"not scored within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            if evaluation.future.cancelled() and self.draining:
                raise Unavailable("the reward service stopped before all was scored") from None
            raise
        finally:
            evaluation.num_waiting -= 1
            if evaluation.num_waiting == 0 and not evaluation.future.done():
                evaluation.cancel()

    def ended(self, evaluation: Evaluation) -> None:
        """Called once when an evaluation is complete or cancelled."""
        self._running.discard(evaluation)
        self._queued_items -= evaluation.num_left
        self._queued_bytes -= evaluation.size
        if not self._running:
            self._idle.set()
            self._rate.idle()
        metrics.QUEUED_ITEMS.set(self._queued_items)
        if not evaluation.request_id:
            return
        if evaluation.future.cancelled():
            self._known.pop(evaluation.request_id, None)
            return
        self._num_remembered += evaluation.room
        if self._num_remembered > self._limits.max_remembered:
            self._forget()

    def _forget(self) -> None:
        """Drops the answers not asked for longest until the rest fit."""
        for request_id, old in list(self._known.items()):
            if self._num_remembered <= self._limits.max_remembered:
                return
            if old.future.done():
                del self._known[request_id]
                self._num_remembered -= old.room
