"""Batches waiting for a worker, served round-robin over jobs."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway.messages import Score


@dataclass(frozen=True, slots=True)
class WireItem:
    """One item as it travels to a worker: JSON texts are parsed there, under its limits."""

    prompt_json: str
    completion: str
    item_json: str
    group: str = ""
    num_tokens: int | None = None  # of the completion, where the caller said
    given_json: str = ""  # what was asked outside for it, and what its graders came to so far

    @property
    def size(self) -> int:
        """Characters."""
        texts = (self.prompt_json, self.completion, self.item_json, self.group)
        return sum(map(len, texts))


# What is scored in one go, each with its position in the request: one item, or a whole
# group for a grader that needs all completions of a prompt.
Unit = tuple[tuple[int, WireItem], ...]


def units_of(items: Sequence[WireItem], whole_groups: bool) -> list[Unit]:
    """One unit an item, or one a group in order of first appearance."""
    if not whole_groups:
        return [((position, item),) for position, item in enumerate(items)]
    members: dict[str | int, list[tuple[int, WireItem]]] = {}
    for position, item in enumerate(items):
        members.setdefault(item.group or position, []).append((position, item))
    return [tuple(unit) for unit in members.values()]


def split(units: Sequence[Unit], step: int) -> Iterator[tuple[Unit, ...]]:
    """The units in runs of at most `step` items; a larger unit is a run of its own."""
    run: list[Unit] = []
    room = step
    for unit in units:
        if run and len(unit) > room:
            yield tuple(run)
            run, room = [], step
        run.append(unit)
        room -= len(unit)
    if run:
        yield tuple(run)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An item that is scored once somebody outside has been asked."""

    asks: dict[str, Any]
    kept: dict[str, Any]
    duration_s: float


class Interest:
    """Says whether anyone still wants the scores of a request."""

    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Units of one request that go to one worker together; `deliver` is called for each item."""

    job_id: str
    grader: dict[str, Any]
    units: tuple[Unit, ...]
    timeout_s: float  # for one item
    deliver: Callable[[int, Score], None]
    interest: Interest
    # takes a unit of which at least one item is unfinished, with a result an item
    ask: Callable[[Unit, list[Score | Unfinished]], None] | None = None
    deaths: Mapping[Unit, int] = field(default_factory=dict)  # of workers that had the unit
    num_failed_preparations: int = 0
    queued_at: float = field(default_factory=time.monotonic)


class FairQueue:
    """First in, first out within a job; one batch a job in turn.

    A batch that would hold a worker for long is given out in pieces, so that the jobs' turns
    are about as long as each other, whatever their graders do.
    """

    def __init__(self, num_items: Callable[[str, str], int] | None = None) -> None:
        """`num_items`: how many items of (job, grader) a piece has at most; None: all."""
        self._num_items = num_items
        self._jobs: OrderedDict[str, deque[Batch]] = OrderedDict()
        self._filled = asyncio.Event()

    def put(self, batch: Batch) -> None:
        """Adds a batch behind its job's others."""
        self._jobs.setdefault(batch.job_id, deque()).append(batch)
        self._filled.set()

    def put_back(self, batch: Batch, step: int) -> None:
        """Adds what is left of a batch before everything else, in pieces of `step` items."""
        waiting = self._jobs.setdefault(batch.job_id, deque())
        for run in reversed([*split(batch.units, step)]):
            waiting.appendleft(replace(batch, units=run))
        self._jobs.move_to_end(batch.job_id, last=False)
        self._filled.set()

    async def get(self) -> Batch:
        """The next batch that is still wanted; waits for one."""
        while True:
            while not self._jobs:
                self._filled.clear()
                await self._filled.wait()
            job_id, waiting = next(iter(self._jobs.items()))
            batch, rest = self._cut(waiting.popleft())
            if rest is not None:
                waiting.appendleft(rest)
            if waiting:
                self._jobs.move_to_end(job_id)
            else:
                del self._jobs[job_id]
            if not batch.interest.cancelled:
                return batch

    def _cut(self, batch: Batch) -> tuple[Batch, Batch | None]:
        """What is given out of a batch, and what is left of it."""
        if self._num_items is None:
            return batch, None
        first, *more = split(batch.units, self._num_items(batch.job_id, batch.grader["type"]))
        left = tuple(unit for run in more for unit in run)
        return replace(batch, units=first), replace(batch, units=left) if left else None
