"""One scoring request on its way through the workers: split, collect, complete."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from headway.graders import GraderSpec
from headway.messages import Score
from services.reward import metrics
from services.reward.cache import GraderCache
from services.reward.outside.lane import Lane, Leaves
from services.reward.outside.rounds import Rounds
from services.reward.request import Request, ServiceLimits, digest_of
from services.reward.waiting import Batch, Interest, Unit, WireItem, split, units_of
from services.reward.workers import WorkerPool

# Items a batch: shared out evenly over the workers, but large enough to stay cheap and small
# enough that jobs take turns.
_SMALLEST_BATCH, _LARGEST_BATCH = 16, 64


class Desk(Protocol):
    """Who keeps the count of what is queued."""

    def delivered(self) -> None:
        """Called for each item that is scored."""

    def ended(self, evaluation: Evaluation) -> None:
        """Called once when an evaluation is complete or cancelled."""


class Evaluation:
    """One request being scored, or its remembered answer."""

    def __init__(self, desk: Desk, request: Request, kind: str, size: int) -> None:
        self._desk = desk
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
        self.digest = digest_of(request)
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
        self._desk.ended(self)

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
        self._desk.delivered()
        if self.num_left == 0:
            self._complete()

    def _complete(self) -> None:
        for outcome, count in self._outcomes.items():
            metrics.ITEMS.labels(self.kind, outcome).inc(count)
        self.future.set_result(tuple(score for score in self._scores if score is not None))
        self._desk.ended(self)
