"""From a grader's plain data to a function that grades one item."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from services.reward.grading.outcome import GradingError
from services.reward.grading.sample import Builder, Grade

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
    "sum": f"{_HERE}.combined:weighted_sum",
    "gate": f"{_HERE}.combined:gate",
    "formula": f"{_HERE}.combined:formula",
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
    return grade
