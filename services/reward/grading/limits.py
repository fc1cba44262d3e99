"""A soft limit on processor time inside a worker.

What takes too long ends as a `timeout` of its item, and the worker, warm with all it has
loaded, goes on. The hard limit is the pool's, which kills: it holds where one call into C
does not return. Processor time, so that a busy machine does not make answers undecided.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.reward.grading.outcome import GradingError


class TookTooLong(GradingError):
    """An item that cannot be decided in time."""

    kind = "timeout"


class _Alarm(BaseException):
    """No library's `except Exception` swallows it."""


@contextmanager
def processor_time(limit_s: float, what: str) -> Iterator[None]:
    """TookTooLong when the block uses more; no limit outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: Any) -> None:
        raise _Alarm

    before = signal.signal(signal.SIGPROF, ring)
    # It rings again: the first may be lost where Python ignores what a destructor raises.
    signal.setitimer(signal.ITIMER_PROF, limit_s, 0.1)
    try:
        yield
    except _Alarm:
        raise TookTooLong(f"{what} took more than {limit_s:g} s of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
