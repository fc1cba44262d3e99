"""The `python` grader: a function of the user's own, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.functions.child import child_of
from services.reward.grading.groups import once_a_group
from services.reward.grading.outcome import (
    BadInput,
    Graded,
    GradingError,
    OutOfMemory,
    checked_reward,
)
from services.reward.grading.sample import Grade, Sample

_WHOLE_GROUP = ("trl", "verl_batch", "rubric_group")
_MAX_MESSAGE = 2000
_MAX_PARTS = 64
_MAX_NAME = 128  # characters of a part's


def python(spec: Mapping[str, Any]) -> Grade:
    """Loads the source, then asks the function."""
    child = child_of(spec)

    def score(samples: Sequence[Sample]) -> list[Graded | GradingError]:
        rows = child.scores([(s.completion, s.prompt, s.item) for s in samples])
        return [_result(row, spec["function"]) for row in rows]

    if spec["call"] in _WHOLE_GROUP:
        return once_a_group(score)

    def grade(sample: Sample) -> Graded:
        (result,) = score([sample])
        if isinstance(result, GradingError):
            raise result
        return result

    return grade


def _result(row: Any, name: str) -> Graded | GradingError:
    """What a child wrote, which the function may have forged, as a result of its own item."""
    if not isinstance(row, dict):
        return GradingError(f"{name} gave no result")
    if "error" in row:
        kinds = {"bad_input": BadInput, "memory": OutOfMemory}
        kind = kinds.get(str(row["error"]), GradingError)
        return kind(str(row.get("message"))[:_MAX_MESSAGE])
    parts = row.get("parts")
    if not isinstance(parts, dict) or len(parts) > _MAX_PARTS:
        return GradingError(f"{name} gave more than {_MAX_PARTS} parts")
    for key in parts:
        if not key.isprintable() or not 0 < len(key) <= _MAX_NAME:
            return GradingError(f"{name} gave a part whose name is {key[:_MAX_NAME]!r}")
    try:
        checked = {key: checked_reward(part, f"{key} of {name}") for key, part in parts.items()}
        return Graded(checked_reward(row.get("reward"), name), checked)
    except GradingError as error:
        return error
