"""The `multiple_choice` grader: which letters did the completion choose?

The last marked answer that is letters (or an option's text) wins; without one, the last
"the answer is B", "Answer: (B)", "option B is correct"; without that, a text or last line
that is nothing but the choice. A letter in prose is no choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.grading.characters import plain_characters
from services.reward.grading.marks import (
    last_box,
    last_tag,
    retracted_after,
    unboxed,
    without_reasoning,
)
from services.reward.grading.numeric import reference_values
from services.reward.grading.outcome import BadInput, Graded
from services.reward.grading.sample import Grade, Sample, text_of, value_of

_MAX_ANSWER = 400
_WRAPPING = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|mathit|operatorname|boldsymbol|mathsf|rm|bf)(?![A-Za-z])|[{}$*_`\"'“”‘’]"
    r"|\\[()\[\],;: ]"
)
_LABEL = re.compile(
    r"\s*(?:(?:the\s+)?(?:correct\s+|right\s+|best\s+|final\s+)*(?:answer|option|choice)s?"
    r"(?:\s+(?:is|are))?|选项?)\s*:?\s*",
    re.IGNORECASE,
)
_LETTERS = re.compile(
    r"[\s(\[<]*([A-Z])[\s)\]>.]*(?:(?:,|;|&|/|、|\band\b|\bor\b|\s)[\s(\[,]*([A-Z])[\s)\]>.]*)*"
)
_CUE = re.compile(
    r"(?:\b(?:answers?|options?|choices?)\b[^\n.:]{0,40}?(?:\b(?:is|are|would be|must be)\b|:|=)"
    r"|\b(?:i|we)\s+(?:\w+\s+){0,2}(?:choose|chose|select|pick|go with)\b"
    r"|(?:答案|选择|应选|选项|选)(?:是|为|:)?)",
    re.IGNORECASE,
)
_CORRECT = re.compile(
    r"(?:(?:\A|[.!?:,;]|\b(?i:option|choice|answer|so|thus|hence|therefore|that|and|then))\s{0,3}"
    r"|\()[*(\[]{0,4}([A-Z])[*)\].]{0,4}\s+(?:is|must be|would be)\s+"
    r"(?:therefore\s+|thus\s+|the\s+)*(?:correct|right|best|answer)"
)
_CONCLUDED = re.compile(
    r"(?:\b(?i:therefore|thus|hence|so|it's|it is|it must be|i say|answer)\b[,:]?|→|=>|->)\s*"
    r"(?:(?i:option|choice|it is|it's)\s+)?[*(\[$]*([A-Z])[*)\]$]*[.!]?\s*\Z"
)
_SMALL = re.compile(r"[\s:*(\[$\"']*([a-z])[*)\]$\"']*[.!]?\s*(?:\Z|\n)")
_CHOSEN = re.compile(
    r"[\s:*_$(\[{\"'“`]*(?:\\\(|\\?(?:boxed|text|mathbf|mathrm|textbf)\s*\{\s*)*"
    r"(?:(?i:option|choice|letter|选项)\s*)?[*(\[{$]*"
    r"([A-Z](?:\s*(?:,|、|&|/|and\b|or\b)?\s*\(?[A-Z](?![A-Za-z'’]))*)(?![A-Za-z'’])([^\n]{0,40})"
)
_ENDS = re.compile(
    r"[\s*_$)\]}\"'”`]*(?:\Z|[.,;:!?)\]}(]|[–—]|\s-+\s|\b(?:because|since|as|so|and|which|is|due|for|given|by|"
    r"with|where|based|while|though|but|here|in|not)\b|[^\x00-\x7f])"
)
_STATED_LINE = re.compile(
    r"[\s*_#>-]*[(\[]?([A-Z])[)\].:,]?[*_\s]*(?:\Z|(?<=[).:\]*])\s*\S.*|(?<=[,\s])[-–—b]\S*\s.*)"
)
_LOOSE = re.compile(r"(?<![A-Za-z'’\\])[(\[*]{0,3}([A-Z])(?![A-Za-z'’])")
_NOT = re.compile(r"\bnot\b|n't\b|\bneither\b|\bnone\b", re.IGNORECASE)


def multiple_choice(spec: Mapping[str, Any]) -> Grade:
    """Reads the right letters from the item, then compares them with the chosen ones."""
    letters: str = spec["choices"]

    def grade(sample: Sample) -> Graded:
        options = _options(spec["options"], sample)
        rights = [
            _reference(value, letters, options, spec["first_index"])
            for value in reference_values(spec["reference"], sample)
        ]
        chosen = choice_of(text_of(spec["input"], sample), letters, options)
        return Graded(float(bool(chosen) and chosen in rights))

    return grade


def choice_of(text: str, letters: str, options: Sequence[str] = ()) -> frozenset[str]:
    """The letters that a text chooses; empty where it chooses none."""
    text = plain_characters(without_reasoning(text))
    for mark in _marks_from_the_end(text):
        if not mark.strip():
            return frozenset()
        chosen = _whole(mark, letters, options)
        if chosen:
            return chosen
    stated = _stated(text, letters, options)
    if stated is not None:
        return stated
    lines = text.strip().splitlines()
    if not lines:
        return frozenset()
    if len(lines) == 1 or len(lines[-1]) <= _MAX_ANSWER:
        chosen = _whole(lines[-1], letters, options) or _labelled(lines[-1], letters)
        if chosen:
            return chosen
    return _labelled(lines[0], letters) if len(lines) == 1 else frozenset()


def _marks_from_the_end(text: str) -> list[str]:
    marks: list[tuple[int, str]] = []
    box = last_box(text)
    if box is not None:
        marks.append((box.start, "" if box.content is None else unboxed(box.content) or " "))
    tagged = last_tag(text)
    if tagged is not None:
        start, content = tagged
        inner = last_box(content)
        if inner is not None and inner.content is not None:
            content = unboxed(inner.content)
        marks.append((start + len(content), content))
    for line in re.finditer(r"^[ \t]*####[ \t]*(\S[^\n]*)", text, re.MULTILINE):
        marks.append((line.start(), line.group(1)))
    return [mark for _, mark in sorted(marks, reverse=True)[:3]]


def _whole(text: str, letters: str, options: Sequence[str]) -> frozenset[str]:
    """A text that is nothing but the choice: B, (b), B., B and C, BC, B) Paris, Paris."""
    if len(text) > _MAX_ANSWER:
        return frozenset()
    plain = " ".join(_WRAPPING.sub(" ", text).split())
    plain = plain[match.end() :] if (match := _LABEL.match(plain)) else plain
    by_text = _option(plain, letters, options)
    if by_text:
        return by_text
    bare = plain.strip(" ().[]:,;!?<>。")
    if len(bare) == 1:
        return _known(bare.upper(), letters)
    if bare.isupper() and bare.isalpha() and len(set(bare)) == len(bare):
        return _known(bare, letters)
    if _LETTERS.fullmatch(plain):
        return _known("".join(re.findall(r"\b[A-Z]\b", plain)), letters)
    labelled = re.match(r"[(\[]?([A-Z])[)\].:]\s*(.*)", plain)
    if labelled and not re.match(r"\s*[(\[]?[A-Z][)\].,:]", labelled[2]):
        named = _option(labelled[2], letters, options)
        if not named or labelled[1] in named:
            return _known(labelled[1], letters)
    return frozenset()


def _stated(text: str, letters: str, options: Sequence[str]) -> frozenset[str] | None:
    """The last statement of a choice; None where nothing is stated."""
    found: list[tuple[int, int, frozenset[str]]] = []
    for cue in _CUE.finditer(text):
        if _NOT.search(cue.group()):
            continue
        chosen, end = _after(text, cue.end(), letters, options)
        if chosen:
            found.append((cue.end(), end, chosen))
    for pattern in (_CORRECT, _CONCLUDED):
        for match in pattern.finditer(text):
            if match[1] in letters and not _NOT.search(match[0]):
                found.append((match.start(1), match.end(), frozenset(match[1])))
    if not found:
        return None
    _, end, chosen = max(found, key=lambda entry: entry[0])
    if retracted_after(text, end):
        loose = [match[1] for match in _LOOSE.finditer(text, end) if match[1] in letters]
        loose = [letter for letter in loose if letter not in "AI" or letter == loose[-1]]
        return frozenset(loose[-1:])
    return chosen


def _after(
    text: str, begin: int, letters: str, options: Sequence[str]
) -> tuple[frozenset[str], int]:
    match = _CHOSEN.match(text, begin, begin + 200)
    if match and not _NOT.search(text, begin, match.start(1)):
        tail = match[2]
        plain_end = _ENDS.match(tail) is not None
        if plain_end or (match[1][-1] not in "AI" and tail[:1].isspace()):
            return _known("".join(c for c in match[1] if c.isupper()), letters), match.end(1)
    if small := _SMALL.match(text, begin, begin + 60):
        return _known(small[1].upper(), letters), small.end(1)
    if options:
        ending = re.search(r"[.!?\n]|\Z", text[begin : begin + _MAX_ANSWER])
        end = begin + (ending.start() if ending else _MAX_ANSWER)
        return _option(_WRAPPING.sub(" ", text[begin:end]), letters, options), end
    return frozenset(), begin


def _labelled(line: str, letters: str) -> frozenset[str]:
    """A line that begins as a choice does: "B) Paris", "(B) because …"."""
    match = _STATED_LINE.fullmatch(line[:_MAX_ANSWER])
    rest = line[match.end(1) :] if match else ""
    if not match or any(m[1] in letters and m[1] not in "AI" for m in _LOOSE.finditer(rest)):
        return frozenset()
    return _known(match[1], letters)


def _known(chosen: str, letters: str) -> frozenset[str]:
    return frozenset(chosen) if chosen and set(chosen) <= set(letters) else frozenset()


def _option(text: str, letters: str, options: Sequence[str]) -> frozenset[str]:
    wanted = _folded(text)
    if not wanted:
        return frozenset()
    hits = [letter for letter, option in zip(letters, options, strict=False)
            if _folded(option) == wanted]  # fmt: skip
    return frozenset(hits) if len(hits) == 1 else frozenset()


def _folded(text: str) -> str:
    return " ".join(_WRAPPING.sub(" ", text).casefold().split()).strip(" .")


def _options(options: Any, sample: Sample) -> list[str]:
    value = value_of(options, sample) if isinstance(options, str) else options
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = value.get("text", list(value.values()))
    if not isinstance(value, list) or not all(isinstance(v, str | int | float) for v in value):
        raise BadInput("the options are no list of texts")
    return [str(option) for option in value]


def _reference(
    value: Any, letters: str, options: Sequence[str], first_index: int | None
) -> frozenset[str]:
    if first_index is not None:
        number = int(value) if isinstance(value, int | str) and str(value).isdecimal() else -1
        if isinstance(value, bool) or not 0 <= number - first_index < len(letters):
            raise BadInput(f"the reference {str(value)[:80]!r} is no choice's number")
        return frozenset(letters[number - first_index])
    if not isinstance(value, str):
        raise BadInput(f"the reference {str(value)[:80]!r} is no letter: see first_index")
    box = last_box(value)
    content = value if box is None or box.content is None else unboxed(box.content)
    right = _whole(content, letters, options)
    if not right:
        raise BadInput(f"the reference {value[:80]!r} is none of {letters}")
    return right
