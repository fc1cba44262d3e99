"""A job's events and metrics on their way into the journal, in order, beside the steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from headway.patience import patiently
from headway.telemetry import get_logger

log = get_logger(__name__)


class JournalLike(Protocol):
    """Where events and metrics rows go (`headway.journal.Journal`)."""

    async def append_event(self, kind: str, message: str, **fields: Any) -> str:
        """Adds an event."""

    async def append_metrics(self, step: int, row: Mapping[str, Any]) -> str:
        """Adds one step's metrics."""


class Events:
    """Takes entries at once and writes them in order; a short absence of Redis loses none."""

    def __init__(self, journal: JournalLike) -> None:
        self._journal = journal
        self._queue: asyncio.Queue[tuple[str, str, Mapping[str, Any]]] = asyncio.Queue()

    def add(self, kind: str, message: str, **fields: Any) -> None:
        """Queues an event and logs it."""
        log.info(
            "%s", message, extra={"event": kind, **{f"field_{k}": v for k, v in fields.items()}}
        )
        self._queue.put_nowait((kind, message, fields))

    def metrics(self, step: int, row: Mapping[str, Any]) -> None:
        """Queues a step's metrics row."""
        self._queue.put_nowait(("", str(step), row))

    async def run(self) -> None:
        """Writes for ever."""
        while True:
            entry = await self._queue.get()
            try:
                await patiently(lambda entry=entry: self._write(*entry))  # type: ignore[misc]
            finally:
                self._queue.task_done()

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Returns when all that was queued is written, or the time is up."""
        async with asyncio.timeout(timeout_s):
            await self._queue.join()

    async def _write(self, kind: str, message: str, fields: Mapping[str, Any]) -> str:
        if kind:
            return await self._journal.append_event(kind, message, **fields)
        return await self._journal.append_metrics(int(message), fields)
