"""The named graders inside of a combination, as it evaluates them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from services.reward.grading.evaluate import build
from services.reward.grading.outcome import GradingError, checked_reward
from services.reward.grading.sample import Grade, Sample

# Rewards by name: a part's own, and those of its parts as part/inner.
Rewards = dict[str, float]


class Part:
    """One grader of a combination: what it raises names it."""

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        self.name = name
        self._kind = spec["type"]
        self._grade: Grade = build(spec)

    def __call__(self, sample: Sample) -> Rewards:
        """Its reward, finite, under its name. GradingError with its name in front."""
        try:
            graded = self._grade(sample)
            reward = checked_reward(graded.reward, f"a {self._kind} grader")
        except GradingError as error:
            raise error.within(self.name) from error
        inner = {f"{self.name}/{name}": value for name, value in graded.parts.items()}
        return {self.name: reward, **inner}


def named_parts(graders: Mapping[str, Mapping[str, Any]]) -> list[Part]:
    """The parts of a combination."""
    return [Part(name, spec) for name, spec in graders.items()]


def grade_all(parts: Iterable[Part], sample: Sample) -> Rewards:
    """Every part's rewards. GradingError when one cannot be graded."""
    rewards: Rewards = {}
    for part in parts:
        rewards.update(part(sample))
    return rewards
