"""Where in a completion its answer stands, for answers that may be any mathematics."""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.reward.grading.marks import marked, retracted_after, statements, without_reasoning
from services.reward.grading.units import is_unit

_TAIL = 4000  # an unmarked answer is looked for in the last characters
_CLAUSE = 1000
_SEGMENT = re.compile(
    r"\$\$([^$]{1,800}?)\$\$|\\\[(.{1,800}?)\\\]|(?<!\\)\$((?:\\.|[^$\n\\]){1,800}?)\$"
    r"|\\\((.{1,800}?)\\\)",
    re.DOTALL,
)
_BETWEEN = re.compile(r"\s*(?:,|;|,?\s*\band\b|,?\s*\bor\b)\s*", re.IGNORECASE)
_CLAUSE_END = re.compile(
    r"(?<=\S)(?:[.!?;](?:\s|\Z)|\n|,?\s+\b(?:because|since|which|so|as|where|but|not|when|with)\b|,\s+[a-z]{2})"
)
_FILLER = re.compile(
    r"\s*(?:\b(?:approximately|about|around|roughly|simply|just|exactly|equal to|therefore|thus"
    r"|indeed|given by|indeed|that|option|choice|then|of course|the)\b|[*_:=\s])+",
    re.IGNORECASE,
)
_TELLS = re.compile(
    r"(?<![A-Za-z])(?:is|are|get|gets|gives|give|equals|equal to|be|have|obtain|yields|becomes)\b:?"
    r"|:(?=\s)|=>|→",
    re.IGNORECASE,
)
_NUMBER_AFTER = re.compile(r"(?<![A-Za-z\\])\d")


def final_answer(completion: str) -> list[str]:
    """Where the answer may stand, best first: its text, and less of it where it reads as prose.

    A marked answer is alone in the list; an empty list means no answer at all.
    """
    text = without_reasoning(completion)
    mark = marked(text)
    if mark is not None:
        return [mark]
    return list(_unmarked(text))


def _unmarked(text: str) -> Iterator[str]:
    cues = statements(text)
    if cues and not retracted_after(text, _end_of_clause(text, cues[-1])):
        yield from _clause(text[cues[-1] : cues[-1] + _CLAUSE])
        return
    text = text.strip()
    tail = text[-_TAIL:]
    if len(text) <= _CLAUSE and "\n" not in text:
        yield text
    segments = list(_SEGMENT.finditer(tail))
    if segments and not _NUMBER_AFTER.search(tail, segments[-1].end()):
        yield _run(tail, segments)
        return
    line = (tail.splitlines() or [""])[-1]
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", line)[-1]
    tells = list(_TELLS.finditer(sentence))
    if tells and retracted_after(sentence, tells[-1].end()):
        return
    if tells:
        yield from _clause(sentence[tells[-1].end() :])
    elif len(sentence) < len(text):
        yield sentence


def _end_of_clause(text: str, begin: int) -> int:
    ending = _CLAUSE_END.search(text, begin, begin + _CLAUSE)
    return ending.start() if ending else min(len(text), begin + _CLAUSE)


def _clause(text: str) -> Iterator[str]:
    filler = _FILLER.match(text)
    text = text[filler.end() :] if filler else text
    first = _SEGMENT.match(text)
    if first is not None:
        yield _run(text, list(_SEGMENT.finditer(text)), forwards=True)
        return
    yield text[: _end_of_clause(text, 0)]


def _run(text: str, segments: list[re.Match[str]], forwards: bool = False) -> str:
    """The first (or last) maths and what commas and conjunctions join to it, as one text."""
    if not forwards:
        segments = segments[::-1]
    run = [segments[0]]
    for segment in segments[1:]:
        left, right = (run[-1], segment) if forwards else (segment, run[-1])
        if not _BETWEEN.fullmatch(text, left.end(), right.start()):
            break
        run.append(segment)
    first, last = (run[0], run[-1]) if forwards else (run[-1], run[0])
    rest = re.match(r"\s*(?:\\?%|°|[A-Za-z]{1,12}\b)", text[last.end() :])
    joined = text[first.start() : last.end()]
    return joined + (rest[0] if rest and _is_measure(rest[0]) else "")


def _is_measure(text: str) -> bool:
    word = text.strip()
    return word.endswith("%") or word.lower() == "percent" or (len(word) > 1 and is_unit(word))
