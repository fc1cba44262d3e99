"""`length` and `overlong`: how long a completion is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.reward.grading.outcome import BadInput, Graded
from services.reward.grading.sample import Grade, Sample, text_of


def length(spec: Mapping[str, Any]) -> Grade:
    """1 inside the bounds, linear to 0 over the margin."""
    target, shortest, longest = spec["target"], spec["min"], spec["max"]
    if target is not None:
        shortest = longest = target
    margin = spec["margin"] if spec["margin"] is not None else target or 0
    measure = _measure(spec)

    def grade(sample: Sample) -> Graded:
        found = measure(sample)
        outside = max(shortest - found, 0 if longest is None else found - longest, 0)
        if not outside:
            return Graded(1.0)
        return Graded(max(0.0, 1.0 - outside / margin) if margin else 0.0)

    return grade


def overlong(spec: Mapping[str, Any]) -> Grade:
    """`headway.rl.shaping.overlong_penalty` of one length (DAPO, arXiv:2503.14476, eq. 13)."""
    start, buffer = spec["max_length"] - spec["len"], spec["len"]
    measure = _measure(spec)

    def grade(sample: Sample) -> Graded:
        beyond = min(max(measure(sample) - start, 0), buffer)
        return Graded(-spec["penalty_factor"] * beyond / buffer)

    return grade


def _measure(spec: Mapping[str, Any]) -> Callable[[Sample], int]:
    if spec["unit"] == "tokens":
        return _tokens
    if spec["unit"] == "words":
        return lambda sample: len(text_of(spec["input"], sample).split())
    return lambda sample: len(text_of(spec["input"], sample))


def _tokens(sample: Sample) -> int:
    if sample.num_tokens is None:
        raise BadInput("nobody said how many tokens the completion has: send num_tokens, or use"
                       " the unit characters or words")  # fmt: skip
    return sample.num_tokens
