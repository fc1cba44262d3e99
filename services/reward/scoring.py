"""Scoring requests: check, admit, split, collect, remember.

A request consumes room in a bounded queue and is answered when its last item is
scored. The same request id joins the evaluation that runs, or gets the remembered
answer. Work that nobody waits for any more is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import Conflict, DeadlineExceeded, InvalidSpec, TooMany, Unavailable
from headway.graders import GraderSpec
from headway.messages import Score
from headway.waits import Wait
from services.reward import metrics
from services.reward.cache import GraderCache, ScoreCache
from services.reward.checking import Verdict, accepted, verdict_of
from services.reward.outside.lane import Lane, Leaves
from services.reward.outside.rounds import Rounds
from services.reward.pace import Rate
from services.reward.waiting import Batch, Interest, Unit, WireItem, split, units_of
from services.reward.workers import WorkerPool

# Items a batch: shared out evenly over the workers, but large enough to stay cheap and small
# enough that jobs take turns.
_SMALLEST_BATCH, _LARGEST_BATCH = 16, 64
_LONGEST_ID = 1024  # of a request or a job: they are kept as long as answers are
# When a full queue says to ask again; _HINT_S where nothing has been measured.
_SHORTEST_HINT_S, _HINT_S, _LONGEST_HINT_S = 0.1, 1.0, 60.0


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What one request may ask and how much may wait."""

    item_timeout_s: float = 10.0  # where the grader names none
    max_item_timeout_s: float = 300.0
    max_items: int = 4096
    max_request_bytes: int = 64 << 20
    max_item_bytes: int = 4 << 20
    max_queued_items: int = 16_384
    max_queued_bytes: int = 256 << 20
    max_request_s: float = 3600.0
    max_remembered: int = 200_000  # results kept for repeated request ids
    max_cached: int = 200_000  # rewards kept by content; 0: none
    max_cached_bytes: int = 128 << 20

    @property
    def max_wire_bytes(self) -> int:
        """Of a request on its way: beyond its items' texts, what frames and escapes them."""
        return self.max_request_bytes * 5 // 4 + (1 << 20)


@dataclass(frozen=True, slots=True)
class Request:
    """A scoring request of either door."""

    request_id: str
    job_id: str
    grader_json: str
    items: Sequence[WireItem]


class Scorer:
    """Answers requests with the pool's help."""

    def __init__(self, pool: WorkerPool, lane: Lane, limits: ServiceLimits) -> None:
        self._pool = pool
        self._lane = lane
        self._limits = limits
        self._known: OrderedDict[str, _Evaluation] = OrderedDict()
        self._num_remembered = 0
        self._cache = ScoreCache(limits.max_cached, limits.max_cached_bytes)
        self._rate = Rate(time.monotonic)
        self._queued_items = 0
        self._queued_bytes = 0
        self._running: set[_Evaluation] = set()
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
        oldest: dict[str, _Evaluation] = {}
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

    def _find(self, request: Request) -> _Evaluation | None:
        known = self._known.get(request.request_id) if request.request_id else None
        if known is None:
            return None
        if known.digest != _digest(request):
            raise Conflict(
                f"request_id {request.request_id!r} was used for another request: choose a new one"
            )
        self._known.move_to_end(request.request_id)
        return known

    def _begin(self, request: Request) -> _Evaluation:
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
        evaluation = _Evaluation(self, request, grader.type, size)
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

    async def _wait(self, evaluation: _Evaluation, timeout_s: float) -> tuple[Score, ...]:
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

    def ended(self, evaluation: _Evaluation) -> None:
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


class _Evaluation:
    """One request being scored, or its remembered answer."""

    def __init__(self, scorer: Scorer, request: Request, kind: str, size: int) -> None:
        self._scorer = scorer
        self._items: Sequence[WireItem] = request.items
        self.kind = kind
        self.began_at = asyncio.get_running_loop().time()
        self._interest = Interest()
        self._cache: GraderCache | None = None
        self._keys: dict[int, bytes] = {}  # under which the rewards of positions are to be kept
        self._rounds: Rounds | None = None
        self._outcomes: Counter[str] = Counter()
        self._seconds = metrics.ITEM_SECONDS.labels(kind)
        self._scores: list[Score | None] = [None] * len(request.items)
        self.request_id = request.request_id
        self.job_id = request.job_id
        self.digest = _digest(request)
        self.size = size
        self.num_items = len(request.items)
        self.num_left = len(request.items)
        self.room = 1 + self.num_items  # of `max_remembered`; a request without items takes some
        self.num_waiting = 0
        self.future: asyncio.Future[tuple[Score, ...]] = asyncio.get_running_loop().create_future()

    def use(self, cache: GraderCache | None) -> None:
        """Before `submit`: rewards that are known are taken from there, and new ones kept."""
        self._cache = cache

    def submit(
        self, pool: WorkerPool, grader: GraderSpec, timeout_s: float, limits: ServiceLimits,
        lane: Lane, leaves: Leaves,
    ) -> None:  # fmt: skip
        """Hands the items to the pool in batches; a whole-group grader's groups stay whole."""
        fitting = []
        for unit in units_of(self._items, grader.whole_group()):
            largest = max(item.size for _, item in unit)
            if largest <= limits.max_item_bytes:
                if not self._is_known(unit):
                    fitting.append(unit)
                continue
            message = f"{largest} characters; an item has at most {limits.max_item_bytes}"
            for position, _ in unit:
                self._deliver(position, Score(None, {}, "bad_input", message))
        share = math.ceil(sum(map(len, fitting)) / pool.num_workers)
        step = min(max(share, _SMALLEST_BATCH), _LARGEST_BATCH)
        batch = Batch(
            self.job_id,
            grader.model_dump(mode="json"),
            (),
            timeout_s,
            self._deliver,
            self._interest,
        )
        if leaves:
            self._rounds = Rounds(lane, leaves, batch, pool.submit)
            self._rounds.begin(split(fitting, step))
        else:
            for run in split(fitting, step):
                pool.submit(replace(batch, units=run))
        self._items = ()
        if not self.num_items:
            self._complete()

    def cancel(self) -> None:
        """Drops what is not yet scored."""
        self._interest.cancelled = True
        if self._rounds is not None:
            self._rounds.cancel()
        self.future.cancel()
        self._scorer.ended(self)

    def _is_known(self, unit: Unit) -> bool:
        """Whether the unit, one item, has been scored before; its reward is delivered then."""
        if self._cache is None:
            return False
        position, item = unit[0]
        key = self._cache.key(item)
        score = self._cache.get(key)
        if score is None:
            self._keys[position] = key
            return False
        self._settle(position, score)
        return True

    def _deliver(self, position: int, score: Score) -> None:
        if self.future.done():
            return
        if self._rounds is not None:
            score = self._rounds.finished(position, score)
        self._seconds.observe(score.duration_s)
        if self._cache is not None and position in self._keys:
            self._cache.put(self._keys.pop(position), score)
        self._settle(position, score)

    def _settle(self, position: int, score: Score) -> None:
        self._outcomes[score.error_kind or "ok"] += 1
        self._scores[position] = score
        self.num_left -= 1
        self._scorer.delivered()
        if self.num_left == 0:
            self._complete()

    def _complete(self) -> None:
        for outcome, count in self._outcomes.items():
            metrics.ITEMS.labels(self.kind, outcome).inc(count)
        self.future.set_result(tuple(score for score in self._scores if score is not None))
        self._scorer.ended(self)


def _digest(request: Request) -> bytes:
    items = [
        (i.prompt_json, i.completion, i.item_json, i.group, i.num_tokens) for i in request.items
    ]
    text = json.dumps([request.job_id, request.grader_json, items])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
