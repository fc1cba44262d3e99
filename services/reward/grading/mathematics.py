"""The `math` grader: is a completion's final answer mathematically the right one?

The last marked answer wins; without one, the stated final answer; without that, the last
maths or number. What cannot be read, or is too large to compute, is right only where it is
spelt as the reference is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from services.reward.grading.limits import processor_time
from services.reward.grading.marks import marked
from services.reward.grading.maths.finding import final_answer
from services.reward.grading.maths.library import agrees, worth_asking
from services.reward.grading.maths.notation import key, tidy
from services.reward.grading.maths.reading import MAX_LENGTH, read, readings
from services.reward.grading.maths.sameness import Margins, same
from services.reward.grading.maths.shapes import Opaque, Shape, Words
from services.reward.grading.numeric import extract, reference_values
from services.reward.grading.outcome import BadInput, Graded
from services.reward.grading.sample import Grade, Sample, text_of

SOFT_LIMIT_S = 3.0
_MAX_REFERENCE = 20_000


def mathematics(spec: Mapping[str, Any]) -> Grade:
    """Reads the right answers from the item, then compares."""
    margins = Margins(spec["abs_tol"], spec["rel_tol"], spec["percent"])

    def grade(sample: Sample) -> Graded:
        values = reference_values(spec["reference"], sample)
        text = text_of(spec["input"], sample)
        with processor_time(SOFT_LIMIT_S, "comparing the answers"):
            return Graded(grade_math(text, values, margins))

    return grade


def grade_math(text: str, references: Sequence[Any], margins: Margins) -> float:
    """1.0 where the text's answer is one of the references, else 0.0."""
    golds = [_reference(reference) for reference in references]
    return 1.0 if any(_right(gold, text, margins) for gold in golds) else 0.0


def _right(gold: str, text: str, margins: Margins) -> bool:
    read_one = False
    for candidate in final_answer(text):
        answer = _tidied(candidate)
        if answer is None:
            continue
        if _matches(gold, answer, margins):
            return True
        shape = read(answer)
        read_one = read_one or not isinstance(shape, Opaque | Words) or shape == Words("")
        if read_one or _large(shape):
            return False
    if marked(text) is not None or len(text) < len(gold):
        return False
    return _matches_last_number(gold, text, margins)


def _matches(gold: str, answer: str, margins: Margins) -> bool:
    if not answer:
        return False
    if key(gold) == key(answer):
        return True
    right, given = readings(gold), readings(answer)
    if any(same(r, g, margins) for r in right for g in given):
        return True
    unread = any(isinstance(shape, Opaque) and not shape.large for shape in (right[0], given[0]))
    return unread and (worth_asking(gold) or worth_asking(answer)) and agrees(gold, answer)


def _matches_last_number(gold: str, text: str, margins: Margins) -> bool:
    """Prose with one number at its end, as `numeric` reads it."""
    number = extract(text, "answer")
    if number is None or number.value is None:
        return False
    value = f"\\frac{{{number.value.numerator}}}{{{number.value.denominator}}}"
    return _matches(gold, value + ("%" if number.percent else ""), margins)


def _tidied(text: str) -> str | None:
    """None for what is too long to be anybody's answer."""
    return None if len(text) > 4 * MAX_LENGTH else tidy(text)


def _large(shape: Shape) -> bool:
    return isinstance(shape, Opaque) and shape.large


@lru_cache(maxsize=4096)  # the completions of one prompt share their reference
def _text_reference(text: str) -> str:
    if len(text) > _MAX_REFERENCE:
        raise BadInput(f"the reference has {len(text)} characters")
    mark = marked(text)
    gold = tidy(text if mark is None else mark)
    if not gold or not key(gold):
        raise BadInput(f"the reference {text[:80]!r} holds no answer")
    return gold


def _reference(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadInput(f"the reference {str(value)[:80]!r} is neither a number nor a text")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"the reference {value} is not finite")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _text_reference(value if isinstance(value, str) else _spelt(value))


def _spelt(value: float | int) -> str:
    text = repr(value)
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}*10^{{{int(exponent)}}}" if exponent else text
