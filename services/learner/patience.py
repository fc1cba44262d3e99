"""Calls that outlast a short absence of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headway.errors import Unavailable
from headway.telemetry import get_logger

log = get_logger(__name__)
T = TypeVar("T")
PATIENCE_S = 60.0


async def patiently(call: Callable[[], Awaitable[T]], patience_s: float = PATIENCE_S) -> T:
    """Repeats a call that is safe to repeat while its peer is Unavailable.

    Raises the last Unavailable after `patience_s`; any other error at once.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + patience_s
    pause_s = 0.1
    while True:
        try:
            return await call()
        except Unavailable as error:
            if clock() + pause_s > end:
                raise
            log.warning("trying again: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)
