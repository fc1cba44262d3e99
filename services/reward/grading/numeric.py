"""The `numeric` grader: which number of a text is its answer, and is it right?

The last marked answer (`\\boxed{…}`, `#### …`, `<answer>…</answer>`) wins; without
one, the stated final answer ("the answer is …"); without that, the last number. A
marked answer that is not exactly one number is wrong, not searched further.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from services.reward.grading.marks import (
    marked,
    retracted_after,
    statements,
    without_reasoning,
)
from services.reward.grading.numbers import Number, clean, find_numbers, with_unit
from services.reward.grading.outcome import BadInput, Graded
from services.reward.grading.sample import Grade, Sample, text_of, value_of

_MATH = re.compile(r"[\^√±≠π*+/×·=|&!]|\d|\\(?!(?:cm|km|m)\b)[A-Za-z]+")
_NAME = re.compile(r"^\s*\$*\s*[A-Za-z]\s*=(?!=)")
_CLAUSE_END = re.compile(
    r"(?<=\S)(?:[.!?;](?:\s|$)|\n|,\s|\b(?:because|since|which|so|as|where)\b)"
)
_HEDGE = re.compile(r"\s*(?:or|and|to|,|/|\||[-+*×·^–])\s*", re.IGNORECASE)
_NOT = re.compile(r"\bnot\b|n't\b", re.IGNORECASE)


def numeric(spec: Mapping[str, Any]) -> Grade:
    """Reads the right answers from the item, then compares."""
    fields = dict(spec)

    def grade(sample: Sample) -> Graded:
        values = reference_values(spec["reference"], sample)
        return Graded(grade_numeric(text_of(spec["input"], sample), values, fields))

    return grade


def reference_values(reference: Any, sample: Sample) -> list[Any]:
    """The right answers that a spec's `reference` stands for. BadInput when there are none."""
    values: list[Any] = []
    for choice in reference if isinstance(reference, list) else [reference]:
        value = value_of(choice, sample) if isinstance(choice, str) else choice
        values += value if isinstance(value, list) else [value]
    if not values:
        raise BadInput("the item's list of right answers is empty")
    return values


def grade_numeric(text: str, references: Sequence[Any], spec: dict[str, Any]) -> float:
    """1.0 where the text's answer equals one of the references, else 0.0."""
    wanted = [read_reference(reference) for reference in references]
    answer = extract(text, spec["extract"])
    if answer is None or answer.value is None:
        return 0.0
    return 1.0 if any(equal(answer, right, spec) for right in wanted) else 0.0


def extract(text: str, how: str) -> Number | None:
    """The number that is a text's answer; None where there is none. Reasoning does not count."""
    text = without_reasoning(text)
    if how == "answer":
        mark = marked(text)
        if mark is not None:
            return _measured(mark)
    plain = clean(text)
    numbers = find_numbers(plain)
    if not numbers or (how == "only" and len(numbers) != 1):
        return None
    if how == "answer":
        number = _stated(plain, numbers)
    else:
        number = numbers[0] if how == "first" else numbers[-1]
    return None if number is None else with_unit(plain, number)


def _measured(text: str) -> Number | None:
    plain = clean(text)
    number = single(plain)
    return None if number is None else with_unit(plain, number)


def single(text: str) -> Number | None:
    """The number of a cleaned text that holds one number and no other mathematics."""
    numbers = find_numbers(text)
    if len(numbers) != 1:
        return None
    rest = _NAME.sub("", text[: numbers[0].start]) + " " + text[numbers[0].end :]
    return None if _MATH.search(rest.replace("**", "")) else numbers[0]


def _stated(text: str, numbers: list[Number]) -> Number | None:
    cues = statements(text)
    if not cues:
        return numbers[-1]
    begin = cues[-1]
    ending = _CLAUSE_END.search(text, begin)
    end = ending.start() if ending else len(text)
    inside = [number for number in numbers if begin <= number.start < end]
    if not inside:
        return numbers[-1]
    if _NOT.search(text, begin, inside[0].start):  # what it is not is said: then what it is?
        return None if numbers[-1] is inside[0] else numbers[-1]
    if retracted_after(text, inside[0].end):
        return numbers[-1]
    if "=" in text[begin:end]:
        return inside[-1]
    return first_of(text, inside)


def first_of(text: str, numbers: list[Number]) -> Number | None:
    """The first number, unless the next one follows as an alternative to it."""
    if not numbers:
        return None
    if len(numbers) > 1 and _HEDGE.fullmatch(text[numbers[0].end : numbers[1].start]):
        return None
    return numbers[0]


def read_reference(value: Any) -> Number:
    """The number that a reference is. BadInput when it is not exactly one."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadInput(f"the reference {_short(value)} is neither a number nor a text")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadInput(f"the reference {value} is not finite")
        return Number(Fraction(repr(value)), False, 0, 0)
    if isinstance(value, int):
        return Number(Fraction(value), False, 0, 0)
    number = _read_text(value)
    if number is None or number.value is None:
        raise BadInput(f"the reference {_short(value)} is not one number")
    return number


@lru_cache(maxsize=1024)  # the completions of one prompt share their reference
def _read_text(text: str) -> Number | None:
    mark = marked(text)
    return _measured(text if mark is None else mark)


def equal(answer: Number, right: Number, spec: Mapping[str, Any]) -> bool:
    """Whether an answer is a reference, with the spec's `percent`, `abs_tol` and `rel_tol`."""
    given, wanted = answer.value, right.value
    if given is None or wanted is None:
        return False
    if answer.unit is not None and right.unit is not None:
        ratio = answer.unit.ratio(right.unit)
        if ratio is None:
            return False
        given *= ratio
    if answer.percent == right.percent:
        return _close(given, wanted, spec)
    bare = wanted if answer.percent else given
    by_value = spec["percent"] in ("either", "value")
    by_unit = spec["percent"] == "unit" or (spec["percent"] == "either" and abs(bare) > 1)
    scaled = (given / 100, wanted) if answer.percent else (given, wanted / 100)
    return (by_value and _close(*scaled, spec)) or (by_unit and _close(given, wanted, spec))


def _close(answer: Fraction, right: Fraction, spec: Mapping[str, Any]) -> bool:
    if answer == right:
        return True
    if not spec["abs_tol"] and not spec["rel_tol"]:
        return False
    margin = max(Fraction(spec["abs_tol"]), Fraction(spec["rel_tol"]) * abs(right))
    return abs(answer - right) <= margin


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
