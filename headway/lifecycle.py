"""Supervise, drain, stop: how every service lives.

A service is a few named tasks. An unexpected end of any of them, by return or by
exception, stops the process with exit code 1. The first SIGTERM or SIGINT asks
for a drain (`stopping` is set; `main` returns when it is done); the second ends
the process at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from headway.errors import HeadwayError
from headway.telemetry import get_logger

log = get_logger(__name__)
_PR_SET_PDEATHSIG = 1
_EXIT_CODES = {"invalid": 2, "conflict": 2, "unavailable": 3, "unauthorized": 3}


class Lifecycle:
    """One process's tasks and its wish to stop."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs a task that must live as long as the service does."""
        task = asyncio.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait_stopping(self) -> None:
        """Returns when a signal asks to stop; raises what a task failed with."""
        await self.stopping.wait()
        if self._failure is not None:
            raise self._failure

    def signalled(self) -> None:
        """First call: drain. Second: exit now."""
        if self.stopping.is_set():
            log.warning("second signal: exit now")
            os._exit(130)
        log.info("signal received: draining")
        self.stopping.set()

    async def cancel_tasks(self) -> None:
        """Cancels what still runs and waits for it."""
        await end_tasks(list(self._tasks))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self.stopping.is_set():
            return
        error = task.exception() or RuntimeError(f"task {task.get_name()} ended unexpectedly")
        log.error("task %s ended: %s", task.get_name(), error, exc_info=task.exception())
        self._failure = error
        self.stopping.set()


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks until all have ended; what they end with is not looked at.

    Once is not enough: `asyncio.wait_for` of Python 3.11, through which the Redis client
    sends, drops a cancellation that meets the end of what it waits for. Who is cancelled while
    waiting here leaves no task behind either: that comes once all have ended.
    """
    pending = {task for task in tasks if not task.done()}
    cancelled: asyncio.CancelledError | None = None
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=0.2)
        except asyncio.CancelledError as error:
            cancelled = error
        pending = {task for task in pending if not task.done()}
    if cancelled is not None:
        raise cancelled


def run(main: Callable[[Lifecycle], Awaitable[None]]) -> int:
    """Runs a service to its end; returns the process's exit code.

    0: asked to stop and drained. 1: a task or `main` failed. 2: bad settings
    (InvalidSpec), or another is there already (Conflict). 3: something it needs cannot be
    reached (Unavailable).
    """
    return asyncio.run(_run(main))


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel (Linux) to signal this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)


async def _run(main: Callable[[Lifecycle], Awaitable[None]]) -> int:
    lifecycle = Lifecycle()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, lifecycle.signalled)
    try:
        await main(lifecycle)
    except HeadwayError as error:
        log.error("%s", error, extra={"kind": error.kind})
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_CODES.get(error.kind, 1)
    except Exception:  # a fault of ours: the log has its trace, the exit code says that it failed
        log.exception("the service failed")
        return 1
    finally:
        lifecycle.stopping.set()
        await lifecycle.cancel_tasks()
    return 0
