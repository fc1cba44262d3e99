"""Graders made of graders: `sum`, `gate` and `formula`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.arithmetic import CannotCompute, compiled
from services.reward.grading.outcome import BadInput, Graded
from services.reward.grading.parts import grade_all, named_parts
from services.reward.grading.sample import Grade, Sample


def weighted_sum(spec: Mapping[str, Any]) -> Grade:
    """Every part scores; null when one cannot."""
    parts = named_parts(spec["graders"])
    weights = {part.name: spec["weights"].get(part.name, 1.0) for part in parts}

    def grade(sample: Sample) -> Graded:
        rewards = grade_all(parts, sample)
        return Graded(math.fsum(weights[name] * rewards[name] for name in weights), rewards)

    return grade


def gate(spec: Mapping[str, Any]) -> Grade:
    """`then` is evaluated only where the condition holds."""
    condition, then = named_parts({name: spec[name] for name in ("condition", "then")})

    def grade(sample: Sample) -> Graded:
        rewards = condition(sample)
        if rewards["condition"] < spec["threshold"]:
            return Graded(spec["else"], rewards)
        rewards |= then(sample)
        return Graded(rewards["then"], rewards)

    return grade


def formula(spec: Mapping[str, Any]) -> Grade:
    """Every part scores, then the expression is computed. BadInput where it has no value."""
    parts = named_parts(spec["graders"])
    compute = compiled(spec["formula"], spec["graders"])

    def grade(sample: Sample) -> Graded:
        rewards = grade_all(parts, sample)
        try:
            return Graded(compute(rewards), rewards)
        except CannotCompute as error:
            raise BadInput(f"formula: {error}") from None

    return grade
