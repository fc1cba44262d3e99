"""Counts Ctrl-C (SIGINT) and SIGTERM, so that they are acted upon at safe points only."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """How often the user, or `headway down`, asked to stop."""

    def __init__(self) -> None:
        self.count = 0
        self.by_terminal = False  # Ctrl-C, as opposed to SIGTERM

    def __call__(self) -> int:
        """The count."""
        return self.count

    def received(self, number: int, _: FrameType | None) -> None:
        """Handles a signal."""
        self.count += 1
        self.by_terminal = self.by_terminal or number == signal.SIGINT


@contextmanager
def counting_interrupts() -> Iterator[Interrupts]:
    """While the block runs, SIGINT, SIGTERM and SIGHUP are counted instead of ending it.

    SIGHUP is left alone where it is ignored: so asks `nohup`.
    """
    interrupts = Interrupts()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupts.received) for number in signals}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
