"""Waiting: for a peer that is away, and for whichever comes first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headway.errors import Unavailable
from headway.telemetry import get_logger

log = get_logger(__name__)
T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call that is safe to repeat, however long its peer is Unavailable.

    Any other error is raised at once; who does not want to wait cancels.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except Unavailable as error:
            log.warning("trying again: %s", error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def woken(event: asyncio.Event, timeout_s: float) -> bool:
    """True when the event came before the timeout, in seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
