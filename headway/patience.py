"""Waiting: for a peer that is away, and for whichever comes first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headway.errors import StoreFull, Unavailable
from headway.telemetry import get_logger
from headway.waits import Wait, Waiting

log = get_logger(__name__)
T = TypeVar("T")
_AWAY = Waiting()  # the calls of this process that are being repeated
_REFUSED: set[object] = set()  # those of them that a full store refused last
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call that is safe to repeat, however long its peer is Unavailable.

    Any other error is raised at once; who does not want to wait cancels.
    """
    try:
        return await call()
    except Unavailable as error:
        last = error
    key = object()
    with _AWAY.on("peer", str(last)), contextlib.ExitStack() as at_the_end:
        at_the_end.callback(_REFUSED.discard, key)
        pause_s = _FIRST_PAUSE_S
        while True:
            log.warning("trying again: %s", last)
            (_REFUSED.add if isinstance(last, StoreFull) else _REFUSED.discard)(key)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                return await call()
            except Unavailable as error:
                last = error


def store_is_full() -> bool:
    """Whether a call of this process waits for memory in Redis."""
    return bool(_REFUSED)


def away() -> Wait | None:
    """The longest that this process has been waiting for a peer that is Unavailable."""
    return _AWAY.longest()


async def woken(event: asyncio.Event, timeout_s: float) -> bool:
    """True when the event came before the timeout, in seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
