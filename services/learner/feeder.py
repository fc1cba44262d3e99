"""Keeps the ledger supplied with tickets.

Consumes the prompt stream, produces issued tickets, waits when the ledger holds
as many unfinished groups as it may, and is unblocked when groups are taken (`wake`) or
filtered (it looks from time to time). Ticket k is always the same ticket, so issuing one
twice is harmless and a restarted feeder goes on where the ledger says.
"""

from __future__ import annotations

import asyncio
from collections import deque

from headway.data.stream import Cursor, PromptStream
from headway.ledger.api import Ledger
from headway.messages import Ticket
from headway.patience import patiently, woken
from headway.telemetry import get_logger

log = get_logger(__name__)
_IDLE_S = 0.05
_MAX_IDLE_S = 0.5


class Feeder:
    """Issues tickets until it is cancelled."""

    def __init__(self, ledger: Ledger, stream: PromptStream, batch_groups: int) -> None:
        self._ledger = ledger
        self._stream = stream
        self._batch = batch_groups
        self._cursor = stream.cursor
        self._offer: deque[tuple[Ticket, Cursor]] = deque()  # made, not yet accepted
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """The ledger has room again."""
        self._wake.set()

    @property
    def cursor(self) -> Cursor:
        """The stream's position as of the tickets the ledger has accepted."""
        return self._cursor

    async def run(self) -> None:
        """Issues for ever; tokenisation runs beside the event loop."""
        next_id = (await patiently(self._ledger.counts)).issued_total
        idle_s = _IDLE_S
        while True:
            self._wake.clear()
            accepted = await self.issue(next_id)
            next_id += accepted
            idle_s = _IDLE_S if accepted else min(2 * idle_s, _MAX_IDLE_S)
            if accepted < self._batch:
                await woken(self._wake, idle_s)

    async def issue(self, next_id: int) -> int:
        """Offers one batch of tickets from `next_id` on; how many the ledger took."""
        missing = range(next_id + len(self._offer), next_id + self._batch)
        self._offer += await asyncio.to_thread(self._make, missing)
        tickets = [ticket for ticket, _ in self._offer]
        accepted = await patiently(lambda: self._ledger.issue(tickets))
        for _ in range(accepted):
            self._cursor = self._offer.popleft()[1]
        return accepted

    def _make(self, ids: range) -> list[tuple[Ticket, Cursor]]:
        return [(self._stream.ticket(ticket_id), self._stream.cursor) for ticket_id in ids]
