"""From a grader's plain data to a function that grades one item."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from headway.templates import OUTPUT_JSON
from services.reward.grading.outcome import Graded, GradingError, NoAnswer
from services.reward.grading.sample import Builder, Grade, Sample

_HERE = __package__
# Where each grader's builder is: what is slow to load is loaded when a grader asks for it.
BUILDERS: dict[str, str | Builder] = {
    "string_check": f"{_HERE}.text:string_check",
    "regex": f"{_HERE}.text:regex",
    "text_similarity": f"{_HERE}.similarity:text_similarity",
    "json_schema": f"{_HERE}.schemas:json_schema",
    "length": f"{_HERE}.lengths:length",
    "overlong": f"{_HERE}.lengths:overlong",
    "numeric": f"{_HERE}.numeric:numeric",
    "math": f"{_HERE}.mathematics:mathematics",
    "gsm8k": f"{_HERE}.gsm8k:gsm8k",
    "multiple_choice": f"{_HERE}.choice:multiple_choice",
    "reasoning_gym": f"{_HERE}.gym:reasoning_gym",
    "code": f"{_HERE}.code:code",
    "python": f"{_HERE}.python:python",
    "sum": f"{_HERE}.combined:weighted_sum",
    "gate": f"{_HERE}.combined:gate",
    "formula": f"{_HERE}.combined:formula",
    "judge": f"{_HERE}.judge:judge",
    "reward_model": f"{_HERE}.served:reward_model",
    "remote": f"{_HERE}.served:remote",
}


def build(spec: Mapping[str, Any]) -> Grade:
    """The function of a validated grader. GradingError when this service has none."""
    builder = BUILDERS.get(spec["type"])
    if builder is None:
        raise GradingError(f"this service has no grader {spec['type']!r}")
    if isinstance(builder, str):
        module, _, name = builder.partition(":")
        builder = getattr(importlib.import_module(module), name)
    grade: Grade = builder(spec)
    return _wrong_without_answer(grade) if OUTPUT_JSON in json.dumps(spec) else grade


def _wrong_without_answer(grade: Grade) -> Grade:
    """0 where the completion is not the JSON that a template names a part of."""

    def checked(sample: Sample) -> Graded:
        try:
            return grade(sample)
        except NoAnswer:
            return Graded(0.0)

    return checked
