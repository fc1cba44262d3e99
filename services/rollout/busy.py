"""How long an engine was at work."""

from __future__ import annotations

import time


class BusyClock:
    """Seconds in which something was in flight and not held."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None
        self._held = False
        self.in_flight = 0

    def change(self, in_flight: int = 0, held: bool | None = None) -> None:
        """Adds to what is in flight, or holds and releases all of it."""
        now = time.monotonic()
        if self._since is not None:
            self._total_s += now - self._since
        self.in_flight += in_flight
        self._held = self._held if held is None else held
        self._since = now if self.in_flight and not self._held else None

    @property
    def busy_s(self) -> float:
        """Seconds so far."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._total_s + running
