"""The lane of weight calls: one after the other, each to its own end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from headway.errors import DeadlineExceeded
from headway.telemetry import get_logger

log = get_logger(__name__)
T = TypeVar("T")


class Lane:
    """Runs calls one at a time. A call that has begun outlives the caller who gives up on it.

    An engine that is left in the middle of an update could not be used again.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, call: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
        """The call's result. DeadlineExceeded when its turn does not come within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"an earlier weight call still runs after {timeout_s} s; publish again"
            ) from None
        task = asyncio.create_task(self._to_its_end(call))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def _to_its_end(self, call: Callable[[], Awaitable[T]]) -> T:
        return await call()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._lock.release()
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a weight call failed: %s", error)
