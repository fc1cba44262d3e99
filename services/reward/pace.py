"""How fast items go, as measured: for batches of even length, and for when to ask again."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

_BATCH_S = 0.5  # a batch that a worker is given is to take about so long
_FIRST_BATCH = 8  # of what has not been measured
_MAX_KNOWN = 1024
_NEWEST = 0.5  # weight of the newest measurement


class Pace:
    """Seconds an item of each (job, grader) takes in a worker, most recently used ones."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[tuple[str, str], float] = OrderedDict()

    def measured(self, job_id: str, grader: str, seconds: float) -> None:
        """One item took so long."""
        key = (job_id, grader)
        known = self._seconds.pop(key, seconds)
        self._seconds[key] = known + _NEWEST * (seconds - known)
        if len(self._seconds) > _MAX_KNOWN:
            self._seconds.popitem(last=False)

    def num_items(self, job_id: str, grader: str) -> int:
        """How many of them a worker is given at once, at most."""
        seconds = self._seconds.get((job_id, grader))
        if seconds is None:
            return _FIRST_BATCH
        return max(1, int(_BATCH_S / max(seconds, 1e-6)))


class Rate:
    """Items finished a second, over the last seconds in which there was work."""

    _SPAN_S = 30.0
    _SLICE_S = 0.5

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slices: deque[tuple[float, int]] = deque()  # when each began, items in it
        self._busy_since: float | None = None
        self._last: float | None = None

    def busy(self) -> None:
        """There is work."""
        if self._busy_since is None:
            self._busy_since = self._clock()

    def idle(self) -> None:
        """There is none: what follows is measured by itself."""
        self._last = self.per_s()
        self._busy_since = None
        self._slices.clear()

    def finished(self, num_items: int = 1) -> None:
        """So many items are done."""
        now = self._clock()
        if self._slices and now - self._slices[-1][0] < self._SLICE_S:
            began, count = self._slices[-1]
            self._slices[-1] = began, count + num_items
        else:
            self._slices.append((now, num_items))
        while now - self._slices[0][0] > self._SPAN_S:
            self._slices.popleft()

    def per_s(self) -> float | None:
        """Items a second, at last if there are none now; None before there were any."""
        if self._busy_since is None or not self._slices:
            return self._last
        span_s = min(self._clock() - self._busy_since, self._SPAN_S)
        return sum(count for _, count in self._slices) / max(span_s, 1e-3)
