"""What grading one item can come to."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field


class GradingError(Exception):
    """An item that cannot be scored. `kind` is what the caller is told; never a zero."""

    kind = "internal"


class BadInput(GradingError):
    """The item, or its reference, is not what the grader needs."""

    kind = "bad_input"


@dataclass(slots=True)
class Graded:
    """A reward and the rewards of its parts, by name."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


def checked_reward(value: object, grader: str) -> float:
    """The value as a reward. GradingError names the grader when it is no finite number."""
    if not isinstance(value, numbers.Real):
        raise GradingError(f"{grader} gave {type(value).__name__}, not a number")
    reward = float(value)
    if not math.isfinite(reward):
        raise GradingError(f"{grader} gave {reward}, not a finite number")
    return reward
