"""One completion on its way through the sim engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from headway.messages import Completion, VersionSpan
from services.rollout.sim_content import Content

ROUNDING = 1e-9  # tokens; float error of the progress


@dataclass(slots=True, eq=False)
class Sample:
    """One completion on its way, and the versions that sample it."""

    length: int  # tokens
    compose: Callable[[], Content]  # called at the end: a cancelled one costs nothing
    start: float  # progress at admission
    done: asyncio.Future[Completion]
    cuts: list[tuple[int, int]]  # (first token, version), ascending

    @property
    def end(self) -> float:
        """Progress at its end."""
        return self.start + self.length

    def sampled(self, progress: float) -> int:
        """Whole tokens sampled by now."""
        return min(self.length, math.floor(progress - self.start + ROUNDING))

    def spans(self) -> tuple[VersionSpan, ...]:
        """Which version samples which of its tokens."""
        spans: list[VersionSpan] = []
        for (start, version), (end, _) in zip(
            self.cuts, [*self.cuts[1:], (self.length, -1)], strict=True
        ):
            if start == end:
                continue
            if spans and spans[-1].version == version:
                start = spans.pop().start
            spans.append(VersionSpan(version, start, end))
        return tuple(spans)
