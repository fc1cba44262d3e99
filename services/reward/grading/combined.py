"""Graders made of graders: `sum`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.reward.grading.evaluate import build
from services.reward.grading.outcome import Graded, GradingError, checked_reward
from services.reward.grading.sample import Grade, Sample


def weighted_sum(spec: Mapping[str, Any]) -> Grade:
    """Every part scores; null when one cannot."""
    parts = {name: build(part) for name, part in spec["graders"].items()}
    weights = {name: spec["weights"].get(name, 1.0) for name in parts}

    def grade(sample: Sample) -> Graded:
        rewards: dict[str, float] = {}
        terms = []
        for name, part in parts.items():
            try:
                graded = part(sample)
                reward = checked_reward(graded.reward, f"a {spec['graders'][name]['type']} grader")
            except GradingError as error:
                raise type(error)(f"{name}: {error}") from error
            rewards[name] = reward
            rewards.update({f"{name}/{inner}": r for inner, r in graded.parts.items()})
            terms.append(weights[name] * reward)
        return Graded(math.fsum(terms), rewards)

    return grade
