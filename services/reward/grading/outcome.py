"""What grading one item can come to."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class GradingError(Exception):
    """An item that cannot be scored. `kind` is what the caller is told; never a zero."""

    kind = "internal"

    def within(self, name: str) -> GradingError:
        """The same, said of a grader's part."""
        error = type(self)(f"{name}: {self}")
        error.kind = self.kind
        return error


class BadInput(GradingError):
    """The item, or its reference, is not what the grader needs."""

    kind = "bad_input"


class OutsideFailed(GradingError):
    """Whoever was asked outside gave nothing to score by; each has a kind of its own."""

    def __init__(self, message: str, kind: str = "internal") -> None:
        super().__init__(message)
        self.kind = kind


class Needs(Exception):
    """The item can be graded once somebody outside has been asked. No failure.

    `asks`: by its key, each request as `services.reward.grading.asking` makes it.
    """

    def __init__(self, asks: Mapping[str, Any]) -> None:
        super().__init__(f"{len(asks)} requests")
        self.asks = dict(asks)


class NoAnswer(GradingError):
    """The completion is not JSON, or lacks what a template wants of it: a wrong answer, so 0."""

    kind = "bad_input"


class SandboxUnavailable(GradingError):
    """What must run sandboxed cannot: the sandbox is not installed, or does not hold here."""

    kind = "sandbox_unavailable"


class Spoilt(BaseException):
    """What grades has ended under an item: the worker ends too, and the pool sees to the item."""


class OutOfMemory(GradingError):
    """More memory was wanted than there may be."""

    kind = "memory"


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
