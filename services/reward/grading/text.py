"""`string_check` and `regex`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from services.reward.grading.outcome import Graded
from services.reward.grading.sample import Grade, Sample, text_of

_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}


def string_check(spec: Mapping[str, Any]) -> Grade:
    """Compares as texts."""
    compare = _COMPARISONS[spec["operation"]]

    def grade(sample: Sample) -> Graded:
        text, reference = text_of(spec["input"], sample), text_of(spec["reference"], sample)
        if spec["strip"]:
            text, reference = text.strip(), reference.strip()
        return Graded(float(compare(text, reference)))

    return grade


def regex(spec: Mapping[str, Any]) -> Grade:
    """Searches or matches the whole."""
    options = (("ignore_case", re.I), ("multiline", re.M), ("dot_all", re.S))
    flags = re.NOFLAG
    for option, flag in options:
        flags |= flag if spec[option] else re.NOFLAG
    pattern = re.compile(spec["pattern"], flags)
    matches = pattern.fullmatch if spec["match"] == "full" else pattern.search
    return lambda sample: Graded(float(matches(text_of(spec["input"], sample)) is not None))
