"""Batches waiting for a worker, served round-robin over jobs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headway.messages import Score


@dataclass(frozen=True, slots=True)
class WireItem:
    """One item as it travels to a worker: JSON texts are parsed there, under its limits."""

    prompt_json: str
    completion: str
    item_json: str

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.prompt_json) + len(self.completion) + len(self.item_json)


class Interest:
    """Says whether anyone still wants the scores of a request."""

    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Items of one request that one worker scores in one go; `deliver` is called for each."""

    job_id: str
    grader: dict[str, Any]
    items: tuple[tuple[int, WireItem], ...]  # position in the request, item
    timeout_s: float  # for one item
    deliver: Callable[[int, Score], None]
    interest: Interest
    retried: frozenset[int] = field(default=frozenset())  # positions that crashed a worker once
    num_failed_preparations: int = 0


class FairQueue:
    """First in, first out within a job; one batch a job in turn."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[Batch]] = OrderedDict()
        self._filled = asyncio.Event()

    def put(self, batch: Batch) -> None:
        """Adds a batch behind its job's others."""
        self._jobs.setdefault(batch.job_id, deque()).append(batch)
        self._filled.set()

    def put_back(self, batch: Batch, step: int) -> None:
        """Adds what is left of a batch before everything else, in pieces of `step` items."""
        waiting = self._jobs.setdefault(batch.job_id, deque())
        for first in reversed(range(0, len(batch.items), step)):
            waiting.appendleft(replace(batch, items=batch.items[first : first + step]))
        self._jobs.move_to_end(batch.job_id, last=False)
        self._filled.set()

    async def get(self) -> Batch:
        """The next batch that is still wanted; waits for one."""
        while True:
            while not self._jobs:
                self._filled.clear()
                await self._filled.wait()
            job_id, waiting = next(iter(self._jobs.items()))
            batch = waiting.popleft()
            if waiting:
                self._jobs.move_to_end(job_id)
            else:
                del self._jobs[job_id]
            if not batch.interest.cancelled:
                return batch
