"""The `reasoning_gym` grader: a data set's own `score_answer`.

The import takes about a second; a worker does it once, before the clock of any
item runs. Some data sets evaluate the answer as a formula (sympy): the worker's
limits hold, but it is no sandbox.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from services.reward.grading.marks import last_tag
from services.reward.grading.outcome import BadInput, Graded, checked_reward
from services.reward.grading.sample import Grade, text_of

_scorers: dict[str, Any] = {}


def reasoning_gym(spec: Mapping[str, Any]) -> Grade:
    """Loads reasoning_gym, then scores."""
    import reasoning_gym  # noqa: F401

    return lambda sample: Graded(grade_gym(text_of(spec["input"], sample), sample.item, spec))


def grade_gym(text: str, item: Mapping[str, Any], spec: Mapping[str, Any]) -> float:
    """The data set's score of the answer, 0 to 1; strict: 1 or 0. BadInput for a wrong item."""
    metadata = item.get("metadata")
    name = spec["dataset"] or (
        metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    )
    if not isinstance(name, str):
        raise BadInput("the item has no metadata.source_dataset and the grader names no dataset")
    if "answer" not in item or not isinstance(metadata, Mapping):
        raise BadInput("a reasoning_gym item has answer and metadata")
    value = _scorer(name)(answer_of(text, spec), dict(item))
    reward = checked_reward(value, f"reasoning_gym {name}")
    return float(reward >= 1.0) if spec["strict"] else reward


def answer_of(text: str, spec: Mapping[str, Any]) -> str | None:
    """The part of a completion that is its answer; None where there is none."""
    how = spec["extract"]
    if how == "whole":
        return text.strip()
    if how == "last_line":
        return (text.strip().splitlines() or [""])[-1].strip()
    if how == "marker":
        _, found, after = text.rpartition(spec["marker"])
        return after.strip() if found else None
    tagged = last_tag(text)
    return None if tagged is None else tagged[1].strip()


def _scorer(name: str) -> Any:
    if name not in _scorers:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn

        if name not in DATASETS:
            near = difflib.get_close_matches(name, list(DATASETS), n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise BadInput(f"reasoning_gym has no data set {name!r}{hint}")
        _scorers[name] = get_score_answer_fn(name)
    return _scorers[name]
