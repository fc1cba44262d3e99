"""The named graders inside of a combination, as it evaluates them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from services.reward.grading.asking import digest
from services.reward.grading.evaluate import build
from services.reward.grading.outcome import GradingError, Needs, checked_reward
from services.reward.grading.sample import Grade, Sample

# Rewards by name: a part's own, and those of its parts as part/inner.
Rewards = dict[str, float]


class Part:
    """One grader of a combination: what it raises names it.

    `keep`: beside graders that ask outside, it is graded once and its reward kept with the item.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], keep: bool) -> None:
        self.name = name
        self._key = digest(spec) if keep else ""
        self._kind = spec["type"]
        self._grade: Grade = build(spec)

    def __call__(self, sample: Sample) -> Rewards:
        """Its reward, finite, under its name. GradingError with its name in front."""
        kept = sample.memory.kept
        graded = kept.get(self._key)
        if graded is None:
            try:
                graded = self._grade(sample)
                graded.reward = checked_reward(graded.reward, f"a {self._kind} grader")
            except GradingError as error:
                raise error.within(self.name) from error
            if self._key:
                kept[self._key] = graded
        inner = {f"{self.name}/{name}": value for name, value in graded.parts.items()}
        return {self.name: graded.reward, **inner}


def named_parts(graders: Mapping[str, Mapping[str, Any]]) -> list[Part]:
    """The parts of a combination."""
    keep = any(map(_asks_outside, graders.values()))
    return [Part(name, spec, keep) for name, spec in graders.items()]


def grade_all(parts: Iterable[Part], sample: Sample) -> Rewards:
    """Every part's rewards. GradingError when one cannot be graded.

    Needs has all that the parts ask for, so that it is asked at once; it is raised only where
    none of them failed.
    """
    rewards: Rewards = {}
    asks: dict[str, Any] = {}
    for part in parts:
        try:
            rewards.update(part(sample))
        except Needs as needs:
            asks |= needs.asks
    if asks:
        raise Needs(asks)
    return rewards


def _asks_outside(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return "endpoint" in value or any(map(_asks_outside, value.values()))
