"""The `gsm8k` grader: the number after the last `####`, as GSM8K's own solutions have it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from services.reward.grading.marks import marked, without_reasoning
from services.reward.grading.numbers import Number, clean, find_numbers
from services.reward.grading.numeric import (
    equal,
    extract,
    first_of,
    read_reference,
    reference_values,
)
from services.reward.grading.outcome import Graded
from services.reward.grading.sample import Grade, Sample, text_of

# A heading ("#### Step 1: …") is no answer: what follows must begin as a number does.
_HASHES = re.compile(r"####[ \t]*((?=[-+$€£¥\\({.,\d\u2212*])[^\n]*|(?=\s*\Z))")
_COMPARISON = {"percent": "either", "abs_tol": 0.0, "rel_tol": 0.0}


def gsm8k(spec: Mapping[str, Any]) -> Grade:
    """Reads the right number from the item (a whole GSM8K solution will do), then compares."""

    def grade(sample: Sample) -> Graded:
        rights = [_right(value) for value in reference_values(spec["reference"], sample)]
        answer = answer_of(text_of(spec["input"], sample), spec["strict"])
        right = answer is not None and any(equal(answer, right, _COMPARISON) for right in rights)
        return Graded(float(right))

    return grade


def answer_of(text: str, strict: bool) -> Number | None:
    """The number after the last `####`; without one, unless strict, what `numeric` would find."""
    text = without_reasoning(text)
    hashes = list(_HASHES.finditer(text))
    if strict and not hashes:
        return None
    mark = hashes[-1].group(1) if strict else marked(text, _HASHES)
    if mark is None:
        return extract(text, "answer")
    plain = clean(mark)
    return first_of(plain, find_numbers(plain))


def _right(value: Any) -> Number:
    return read_reference(_solution(value) if isinstance(value, str) else value)


@lru_cache(maxsize=4096)
def _solution(text: str) -> str:
    hashes = list(_HASHES.finditer(text))
    return hashes[-1].group(1) if hashes else text
