"""The items of one request that are unfinished: asked for, then handed in again.

A unit comes out of a worker with what its items need, is asked for by a task of its own, and
goes back to the workers with the answers; through a gate more than once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from headway.graders.parsing import MAX_DEPTH
from headway.messages import Score
from headway.telemetry import get_logger
from services.reward.outside.lane import Lane, Leaves
from services.reward.waiting import Batch, Unfinished, Unit, WireItem, split

log = get_logger(__name__)
_GATHER_S = 0.01  # what is answered within it goes to a worker together
_LARGEST_BATCH = 64
_MAX_ROUNDS = MAX_DEPTH + 2  # each level of gates may ask once more


class Rounds:
    """Asks for one request's units."""

    def __init__(
        self, lane: Lane, leaves: Leaves, batch: Batch, submit: Callable[[Batch], None]
    ) -> None:
        """`batch` is what all of the request's batches share, `submit` hands one in."""
        self._lane, self._leaves, self._submit = lane, leaves, submit
        self._batch = replace(batch, ask=self.ask)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered: list[Unit] = []
        self._cache_keys: dict[int, tuple[str, ...]] = {}
        self._num_rounds: dict[int, int] = {}
        self._spent_s: dict[int, float] = {}

    def begin(self, runs: Iterable[tuple[Unit, ...]]) -> None:
        """Hands in units for the first time, as what waits to be asked has room for them."""
        task = asyncio.create_task(self._begin(runs), name="begin-units")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ask(self, unit: Unit, results: list[Score | Unfinished]) -> None:
        """Takes a unit of which some items are unfinished."""
        task = asyncio.create_task(self._ask(unit, results), name="ask-for-unit")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def finished(self, position: int, score: Score) -> Score:
        """The score with the time of all its rounds; what led to no score is forgotten."""
        if score.reward is None:
            self._lane.forget(self._cache_keys.get(position, ()))
        return replace(score, duration_s=score.duration_s + self._spent_s.get(position, 0.0))

    def cancel(self) -> None:
        """Asks for nothing any more."""
        for task in self._tasks:
            task.cancel()

    async def _begin(self, runs: Iterable[tuple[Unit, ...]]) -> None:
        for run in runs:
            await self._lane.room()
            self._submit(replace(self._batch, units=run))

    async def _ask(self, unit: Unit, results: list[Score | Unfinished]) -> None:
        try:
            pairs = zip(unit, results, strict=True)
            answered = await asyncio.gather(*(self._item(*pair) for pair in pairs))
        except Exception as error:  # whatever a worker wrote: its items are owed a result
            log.warning("asking for a unit failed: %r", error, extra={"job_id": self._batch.job_id})
            for position, _ in unit:
                self._batch.deliver(
                    position, Score(None, {}, "internal", f"asking failed: {error}")
                )
            return
        self._answered.append(tuple(answered))
        if len(self._answered) == 1:
            asyncio.get_running_loop().call_later(_GATHER_S, self._hand_in)

    async def _item(
        self, placed: tuple[int, WireItem], result: Score | Unfinished
    ) -> tuple[int, WireItem]:
        position, item = placed
        self._spent_s[position] = self._spent_s.get(position, 0.0) + result.duration_s
        if isinstance(result, Score):
            return placed
        self._num_rounds[position] = self._num_rounds.get(position, 0) + 1
        if self._num_rounds[position] > _MAX_ROUNDS:
            raise ValueError("it asks without end")
        answered = await self._lane.ask(self._leaves, self._batch.job_id, result.asks)
        self._cache_keys[position] = self._cache_keys.get(position, ()) + answered.cache_keys
        before: Mapping[str, Any] = json.loads(item.given_json) if item.given_json else {}
        answers = {**before.get("answers", {}), **answered.answers}
        return position, replace(
            item, given_json=json.dumps({"answers": answers, "kept": result.kept})
        )

    def _hand_in(self) -> None:
        units, self._answered = self._answered, []
        for run in split(units, _LARGEST_BATCH):
            self._submit(replace(self._batch, units=run))
