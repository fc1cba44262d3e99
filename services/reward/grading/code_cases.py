"""Cases of the `code` grader: their many forms in the field, read into one; what is right."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from services.reward.grading.outcome import BadInput

_INPUTS, _OUTPUTS = ("input", "stdin"), ("output", "expected_output", "stdout")
_FUNCTIONS = ("fn_name", "func_name", "function")


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the program: with a text on stdin, or as a call. Only here what is right."""

    expected: Any
    stdin: str | None = None  # None: a call
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


def read_cases(raw: Any, function: str | None) -> tuple[list[Case], str | None]:
    """Cases and the function they call, if any. BadInput for anything that is no cases.

    Forms: a list of {input, output}; of {args, kwargs, expected}; LiveCodeBench's list with
    `testtype`; the {inputs, outputs, fn_name} of APPS and TACO; each also as JSON text.
    """
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"the cases are a text that is no JSON: {error}") from None
    if isinstance(raw, Mapping):
        function = next((str(raw[key]) for key in _FUNCTIONS if raw.get(key)), function)
        raw = _columns(raw, function is not None)
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise BadInput("the cases are no list, or an empty one")
    cases = [_case(entry, number, function) for number, entry in enumerate(raw)]
    if len({case.stdin is None for case in cases}) > 1:
        raise BadInput("some cases are calls and some give a text to stdin: use one kind")
    if cases[0].stdin is None and not function:
        raise BadInput("the cases are calls, and no function is named")
    return cases, function if cases[0].stdin is None else None


def _columns(raw: Mapping[str, Any], calls: bool) -> list[dict[str, Any]]:
    inputs, outputs = raw.get("inputs"), raw.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadInput("the cases are an object without inputs and outputs of one length")
    if not calls or any(isinstance(given, str) for given in inputs):
        return [
            {"input": _lines(i), "output": _lines(o)} for i, o in zip(inputs, outputs, strict=True)
        ]
    # APPS wraps what a call should give into a list of one.
    return [
        {"args": i, "expected": o, "or_expected": o[0] if isinstance(o, list) and o else o}
        for i, o in zip(inputs, outputs, strict=True)
    ]


def _lines(value: Any) -> Any:
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _case(entry: Any, number: int, function: str | None) -> Case:
    if not isinstance(entry, Mapping):
        raise BadInput(f"case {number} is {type(entry).__name__}, not an object")
    if "args" in entry or "kwargs" in entry:
        args, kwargs = entry.get("args", []), entry.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, Mapping):
            raise BadInput(f"case {number}: args is a list and kwargs an object")
        expected = _one_of(entry, ("expected", "output"), number)
        choices = [expected, entry["or_expected"]] if "or_expected" in entry else [expected]
        return Case(choices, None, tuple(args), kwargs)
    given, expected = _one_of(entry, _INPUTS, number), _one_of(entry, _OUTPUTS, number)
    if entry.get("testtype") == "functional":
        try:
            args = [json.loads(line) for line in str(given).splitlines() if line.strip()]
            return Case([json.loads(str(expected))], None, tuple(args), {})
        except (ValueError, RecursionError) as error:
            raise BadInput(f"case {number}: a functional case is lines of JSON: {error}") from None
    if not isinstance(given, str) or not isinstance(expected, str):
        raise BadInput(f"case {number}: input and output are texts")
    return Case(expected, given)


def _one_of(entry: Mapping[str, Any], keys: Sequence[str], number: int) -> Any:
    for key in keys:
        if key in entry:
            return entry[key]
    raise BadInput(f"case {number} has no {' or '.join(keys)}")


def same_text(text: str, expected: str, tolerance: float) -> bool:
    """Blanks at the ends of lines and line breaks at the end count for nothing.

    With a tolerance, lines are compared word by word, and words that are numbers within it.
    """
    ours, theirs = _trimmed(text), _trimmed(expected)
    if ours == theirs or not tolerance:
        return ours == theirs
    return all(
        a is not None and b is not None and _same_words(a.split(), b.split(), tolerance)
        for a, b in zip_longest(ours, theirs)
    )


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_words(ours: list[str], theirs: list[str], tolerance: float) -> bool:
    return len(ours) == len(theirs) and all(
        a == b or _near(_number(a), _number(b), tolerance)
        for a, b in zip(ours, theirs, strict=True)
    )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _near(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return False
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Plain data of a program against JSON: tuples count as lists, keys also as texts."""
    if isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return False
        return all(same_value(v, e, tolerance) for v, e in zip(value, expected, strict=True))
    if isinstance(expected, Mapping):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        named = {key if isinstance(key, str) else json.dumps(key): v for key, v in value.items()
                 if isinstance(key, str | int | float | None)}  # fmt: skip
        return named.keys() == expected.keys() and all(
            same_value(named[key], part, tolerance) for key, part in expected.items()
        )
    if tolerance and isinstance(value, int | float) and isinstance(expected, int | float):
        try:
            return _near(float(value), float(expected), tolerance)
        except OverflowError:
            return bool(value == expected)
    return isinstance(value, str | int | float | None) and bool(value == expected)
