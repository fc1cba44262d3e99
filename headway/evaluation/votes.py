"""What a completion answers, for votes: equal texts vote for the same answer.

A vote needs no verdict, only an answer, and graders give none back. So the answer is read from
the text as graders of the job's kind look for it: the last mark (`\\boxed{…}`, `#### …`,
`<answer>…</answer>`), without one the last number or letter, else the whole text. Numbers of one
value are one answer (`1,000`, `1000.0`). A completion without any answer votes for none: where
that is what most say, the vote has the reward of those completions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

Voter = Callable[[str], str]
"""From a completion's text to the answer it votes for."""

_NUMBERS = {"numeric", "math", "gsm8k"}
_LETTERS = {"multiple_choice"}

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_NUMBER = re.compile(r"[-−+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?|[-−+]?\.\d+")
_LETTER = re.compile(r"(?<![A-Za-z])([A-Z])(?![A-Za-z])")
_MAX_DIGITS = 400


def voter(grader: Mapping[str, Any]) -> Voter:
    """How completions that this grader judges are read as votes."""
    kinds = set(_kinds(grader))
    if kinds & _NUMBERS:
        return lambda text: _vote(text, _NUMBER)
    if kinds & _LETTERS:
        return lambda text: _vote(text, _LETTER)
    return lambda text: _vote(text, None)


def _kinds(grader: Any) -> Iterator[str]:
    """The types of a grader and of those it is made of."""
    if isinstance(grader, Mapping):
        yield str(grader.get("type"))
    parts = grader.values() if isinstance(grader, Mapping) else grader
    for part in parts if isinstance(grader, Mapping | list) else ():
        yield from _kinds(part)


def _vote(text: str, unmarked: re.Pattern[str] | None) -> str:
    answer = text.rpartition("</think>")[2]
    marked = _last_mark(answer)
    if marked is not None:
        return _normal(marked)
    if unmarked is not None:
        found = unmarked.findall(answer)
        answer = found[-1] if found else ""
    return _normal(answer)


def _last_mark(text: str) -> str | None:
    marks = [(m.start(), m[1]) for pattern in (_TAG, _HASHES) for m in pattern.finditer(text)]
    boxed = text.rfind("\\boxed{")
    if boxed >= 0:
        marks.append((boxed, _braced(text, boxed + len("\\boxed{"))))
    return max(marks)[1] if marks else None


def _braced(text: str, start: int) -> str:
    """What stands between an opening brace, just before `start`, and its closing one."""
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start:end]
    return text[start:]


def _normal(answer: str) -> str:
    words = " ".join(answer.split()).strip("$ .").casefold()
    plain = words.replace(",", "").replace("−", "-")
    if len(plain) <= _MAX_DIGITS and _NUMBER.fullmatch(words):
        try:
            return str(Fraction(plain))
        except (ValueError, ZeroDivisionError):
            return words
    return words
