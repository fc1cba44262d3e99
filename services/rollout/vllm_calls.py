"""Headway's methods on vLLM's worker, called from the engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headway.errors import EpochBroken, Unavailable
from services.rollout.vllm_outputs import error_of, translated

_POLL_S = 0.01  # an engine that samples answers between two steps


class WorkerCalls:
    """The one worker of the AsyncLLM that `running` returns; None: there is none."""

    def __init__(self, running: Callable[[], Any]) -> None:
        self._running = running

    async def call(self, method: str, *args: Any) -> dict[str, Any]:
        """The worker's reply, or the error that it stands for. Unavailable: no engine."""
        if self._running() is None:
            raise Unavailable("the engine is not running")
        calling = self._running().collective_rpc(method, args=tuple(args))
        reply: dict[str, Any] = (await translated(calling))[0]
        if not reply["ok"]:
            raise error_of(reply["kind"], reply["message"])
        return reply

    async def done(self, timeout_s: float, what: str) -> str:
        """Polls until what was begun there is done; its digest. EpochBroken: not in time."""
        # the group has its own deadline for each transfer; this one is for the whole
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    reply = await self.call("headway_poll")
                    if reply["done"]:
                        return str(reply["digest"])
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            await self.leave()
            raise EpochBroken(f"{what} was not complete after {timeout_s:g} s") from error

    async def leave(self) -> None:
        """Leaves the weight group; safe to repeat."""
        if self._running() is not None:
            await self.call("headway_leave")
