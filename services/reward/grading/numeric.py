"""The `numeric` grader: which number of a text is its answer, and is it right?

The last marked answer (`\\boxed{…}`, `#### …`, `<answer>…</answer>`) wins; without
one, the stated final answer ("the answer is …"); without that, the last number. A
marked answer that is not exactly one number is wrong, not searched further.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from services.reward.grading.numbers import Number, clean, closing_brace, find_numbers
from services.reward.grading.outcome import BadInput, Graded
from services.reward.grading.sample import Grade, Sample, text_of, value_of

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES = re.compile(
    r"^[ \t]*####[ \t]*((?=[-+$€£¥\\({.,\d\u2212*])[^\n]*|(?=\s*\Z))", re.MULTILINE
)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_MATH = re.compile(r"[\^√±≠π*+/×·=|&!]|\d|\\(?!(?:cm|km|m)\b)[A-Za-z]+")
_NAME = re.compile(r"^\s*\$*\s*[A-Za-z]\s*=(?!=)")
_CUE = re.compile(
    r"\banswer\b[^\n.:=\d]{0,40}?(?:\bis\b|\bequals\b|:|=)[\s:*_$]*|答案(?:是|为|:)\s*",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(
    r"(?<=\S)(?:[.!?;](?:\s|$)|\n|,\s|\b(?:because|since|which|so|as|where)\b)"
)
_HEDGE = re.compile(r"\s*(?:or|and|to|,|/|\||[-+*×·^–])\s*", re.IGNORECASE)
_NOT = re.compile(r"\bnot\b|n't\b", re.IGNORECASE)
_RETRACTED = re.compile(
    r"\b(?:wait|actually|sorry|correction|mistake|wrong|no,|instead|scratch that)", re.IGNORECASE
)


def numeric(spec: Mapping[str, Any]) -> Grade:
    """Reads the right answers from the item, then compares."""
    fields = dict(spec)

    def grade(sample: Sample) -> Graded:
        reference = spec["reference"]
        choices = reference if isinstance(reference, list) else [reference]
        values: list[Any] = []
        for choice in choices:
            value = value_of(choice, sample) if isinstance(choice, str) else choice
            values += value if isinstance(value, list) else [value]
        if not values:
            raise BadInput("the item's list of right answers is empty")
        return Graded(grade_numeric(text_of(spec["input"], sample), values, fields))

    return grade


def grade_numeric(text: str, references: Sequence[Any], spec: dict[str, Any]) -> float:
    """1.0 where the text's answer equals one of the references, else 0.0."""
    wanted = [_reference(reference) for reference in references]
    answer = extract(text, spec["extract"])
    if answer is None or answer.value is None:
        return 0.0
    return 1.0 if any(_equal(answer, right, spec) for right in wanted) else 0.0


def extract(text: str, how: str) -> Number | None:
    """The number that is a text's answer; None where there is none. Reasoning does not count."""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    if how == "answer":
        marked = _marked(text)
        if marked is not None:
            return _single(clean(marked))
        plain = clean(text)
        numbers = find_numbers(plain)
        return _stated(plain, numbers) if numbers else None
    numbers = find_numbers(clean(text))
    if not numbers or (how == "only" and len(numbers) != 1):
        return None
    return numbers[0] if how == "first" else numbers[-1]


def _marked(text: str) -> str | None:
    """The last marked answer; empty where a mark has none; None where nothing is marked."""
    marks = list(_marks(text))
    return max(marks)[1] if marks else None


def _marks(text: str) -> Iterator[tuple[int, str]]:
    boxes = list(_BOX.finditer(text))
    if boxes:
        opening = boxes[-1].end() - 1
        close = closing_brace(text, opening)
        yield boxes[-1].start(), "" if close is None else text[opening + 1 : close]
    for match in _HASHES.finditer(text):
        yield match.start(), match.group(1)
    tagged = last_tag(text)
    if tagged is not None:
        start, content = tagged
        inner = _marked(content)
        yield start + len(content), content if inner is None else inner


def last_tag(text: str) -> tuple[int, str] | None:
    """Where the last complete <answer>…</answer> begins, and its content."""
    opened = None
    found = None
    for tag in _TAG.finditer(text):
        if not tag.group(1):
            opened = tag.end()
        elif opened is not None:
            found, opened = (opened, text[opened : tag.start()]), None
    return found


def _single(text: str) -> Number | None:
    numbers = find_numbers(text)
    if len(numbers) != 1:
        return None
    rest = _NAME.sub("", text[: numbers[0].start]) + " " + text[numbers[0].end :]
    return None if _MATH.search(rest.replace("**", "")) else numbers[0]


def _stated(text: str, numbers: list[Number]) -> Number | None:
    cues = list(_CUE.finditer(text))
    if not cues:
        return numbers[-1]
    begin = cues[-1].end()
    ending = _CLAUSE_END.search(text, begin)
    end = ending.start() if ending else len(text)
    inside = [number for number in numbers if begin <= number.start < end]
    if not inside or _NOT.search(text, begin, inside[0].start):
        return numbers[-1]
    if _RETRACTED.search(text, inside[0].end):
        return numbers[-1]
    if "=" in text[begin:end]:
        return inside[-1]
    if len(inside) > 1 and _HEDGE.fullmatch(text[inside[0].end : inside[1].start]):
        return None
    return inside[0]


def _reference(value: Any) -> Number:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadInput(f"the reference {_short(value)} is neither a number nor a text")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadInput(f"the reference {value} is not finite")
        return Number(Fraction(repr(value)), False, 0, 0)
    if isinstance(value, int):
        return Number(Fraction(value), False, 0, 0)
    number = _read_reference(value)
    if number is None or number.value is None:
        raise BadInput(f"the reference {_short(value)} is not one number")
    return number


@lru_cache(maxsize=1024)  # the completions of one prompt share their reference
def _read_reference(text: str) -> Number | None:
    marked = _marked(text)
    return _single(clean(text if marked is None else marked))


def _equal(answer: Number, right: Number, spec: dict[str, Any]) -> bool:
    if answer.value is None or right.value is None:
        return False
    if answer.percent == right.percent:
        return _close(answer.value, right.value, spec)
    percent, bare = (answer, right) if answer.percent else (right, answer)
    assert percent.value is not None and bare.value is not None
    by_value = spec["percent"] in ("either", "value")
    by_unit = spec["percent"] == "unit" or (spec["percent"] == "either" and abs(bare.value) > 1)
    scaled = percent.value / 100
    left = (answer.value / 100, right.value) if answer is percent else (answer.value, scaled)
    return (by_value and _close(*left, spec)) or (
        by_unit and _close(answer.value, right.value, spec)
    )


def _close(answer: Fraction, right: Fraction, spec: dict[str, Any]) -> bool:
    if answer == right:
        return True
    if not spec["abs_tol"] and not spec["rel_tol"]:
        return False
    margin = max(Fraction(spec["abs_tol"]), Fraction(spec["rel_tol"]) * abs(right))
    return abs(answer - right) <= margin


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
