"""Numbers in prose and LaTeX, read as exact fractions.

What cannot be read with certainty as one number (a power, a root, a bound, a
date, an ellipsis) counts as unreadable: a wrong 1 is worse than a 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from services.reward.grading.characters import plain_characters
from services.reward.grading.marks import closing_brace
from services.reward.grading.units import CURRENCIES, Unit, is_unit, read_unit

_MAX_DIGITS = 1000
_MAX_EXPONENT = 1000

_FRAC = re.compile(
    r"(?P<sign>[-+]\s*)?\\[dtc]?frac\s*(?:\{\s*(?P<a>-?\d+)\s*\}|(?P<a1>\d))"
    r"\s*(?:\{\s*(?P<b>\d+)\s*\}|(?P<b1>\d))"
)
_REWRITES = [
    (re.compile(r"</?[A-Za-z][^<>]*>"), " "),  # a tag's > is no comparison
    (re.compile(r"[-=]{1,3}>|\\(?:right|Right)arrow\b|\\(?:to|implies)\b"), " → "),
    (re.compile(r"^[ \t]*>+", re.MULTILINE), " "),  # quoted lines
    (re.compile(r"\\(?:left|right|displaystyle|text|textbf|mathrm|mathbf)(?![A-Za-z])"), ""),
    (re.compile(r"\{,\}|(?<=\d)\\[ ,;:!](?=\d{3})"), ","),
    (re.compile(r"\\[ ,;:!]|\\q?quad\b"), " "),
    (re.compile(r"\^\s{0,3}(?:\{\s{0,3})?\\circ\b(?:\s{0,3}\})?|\\degree\b"), "°"),
    (re.compile(r"\b(k?m|cm|mm|ft|mi|yd|in)\s?\}?\s?\^\s?\{?2\}?"), r" \1² "),
    (re.compile(r"\b(k?m|cm|mm|ft|mi|yd|in)\s?\}?\s?\^\s?\{?3\}?"), r" \1³ "),
    (re.compile(r"\\(?:times|cdot)\b"), "×"),
    (re.compile(r"\\sqrt\b"), "√"),
    (re.compile(r"\\(?:pm|mp)\b"), "±"),
    (re.compile(r"\\(?:leq?|geq?|neq?|lt|gt)\b|[<>!]=|[<>≤≥]"), "≠"),
    (re.compile(r"\\(?:dots|ldots|cdots)\b|\.\.\.+"), "…"),
    (re.compile(r"\\(?:overline|bar|dot|pi)\b"), "π"),
    (re.compile(r"\\([$%#])"), r"\1"),
    (re.compile(r"\bper ?cent\b", re.IGNORECASE), "%"),
]
_REPEATED = re.compile(
    r"(?<![\d.])(\d*)\.(?:(\d*)\s?(?:\\(?:overline|bar|dot)\s?\{?(\d{1,99})\}?|\((\d{1,99})\)(?!\d))"
    r"|(\d{2,99})\s?(?:…|\\[lc]?dots\b|\.\.\.+))",
    re.ASCII,
)
_UNIT_AFTER = re.compile(
    r"\s?\\?\{?\s?([A-Za-z°¢€£¥₹]+[²³]?(?:\s?/\s?[A-Za-z]+|\s+per\s+[A-Za-z]+)?"
    r"|(?:square|cubic) [A-Za-z]+)"
)
_LONE_UNITS = frozenset("mghslL°¢€£¥₹")
# Nothing in here has a rewrite; most short answers are of this kind.
_PLAIN = re.compile(r"[A-Za-z0-9 ,.;:'\"()\n$*=?+-]*")
_TOKEN = re.compile(
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ _']\d{3})+(?!\d|\s*/)|\d+)(?:\.\d+)?|\.\d+", re.ASCII
)
_EXPONENT = re.compile(
    r"[eE]([+-]?\d+)(?![A-Za-z0-9.])|\s*[×x*·]\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))",
    re.ASCII,
)
_SEPARATORS = re.compile(r"[ ,_']")
_OVER = re.compile(r"\s?/\s?(\d+)(?!\d|\.\d)", re.ASCII)
_MIXED = re.compile(r" +(\d+)/(\d+)(?!\d|\.\d)", re.ASCII)
_PERCENT = re.compile(r"\s?%")
_SPOILED_AFTER = re.compile(
    r"\s*(?:(?:dozen|hundred|thousand|(?:m|b|tr)illion|squared|cubed|factorial|times\s+\d)\b"
    r"|\^|\*\*\s*[({]?\d|[²³¹⁰⁴-⁹±π√])|[xyznk](?![A-Za-z])|[A-Za-z]*_|[:/.]\d|[xX][0-9A-Fa-f]"
)
_REPEATING = re.compile(r"\s*(?:…|π|\(\d)")
_SPOILED_BEFORE = re.compile(
    r"(?:[A-Za-z\\α-ωΑ-Ω_^√±≠]|[\^_√±≠]\s+|(?:[\^_√π}\]]|frac)\s*\{\s*|√\s*[(\[]\s*)\Z"
)
# What words before a number make of it: its opposite, or something else than the number.
_SIGN_WORD = re.compile(
    r"(?:\b(negative)|(?:\A|[:=(,*$]|\b(?:is|be|equals|get|gives))\s*\b(minus))\s+\Z", re.IGNORECASE
)
_OTHER_VALUE = re.compile(
    r"\b(?:minus|times|twice|double|triple|half(?: of)?|(?:square|cube) root of|square of"
    r"|(?:less|more|greater|fewer|other) than)\s+\$?\Z",
    re.IGNORECASE,
)
_UNARY_GAP = re.compile(r"[=(:{$→]\s*([-+]) \Z")
_JUNK = re.compile(r"(?:\s*\^\s*(?:[+-]?\w+)?|\s*\*\*\s*\d+|[:/.]\d[\d:/.]*|[xX][0-9A-Fa-f]+)*")


def repeating_decimal(whole: str, fixed: str, block: str) -> Fraction:
    """0.1666… is ("0", "1", "6"): exactly 1/6."""
    start = Fraction(int((whole or "0") + fixed), 10 ** len(fixed))
    return start + Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(fixed))


def repeated_block(decimals: str) -> tuple[str, str] | None:
    """What comes before and what repeats in decimals that go on; None where nothing clearly does.

    One digit must stand three times at the end, a longer block twice.
    """
    for size in range(1, min(len(decimals) // 2, 30) + 1):
        times = 3 if size == 1 else 2
        block = decimals[-size:]
        if len(decimals) >= size * times and decimals.endswith(block * times):
            rest = decimals
            while rest.endswith(block):
                rest = rest[:-size]
            return rest, block
    return None


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a text: its exact value (None: unreadable) and whether a % follows."""

    value: Fraction | None
    percent: bool
    start: int
    end: int
    unit: Unit | None = None


def clean(text: str) -> str:
    """The text with look-alike characters and LaTeX spellings made plain."""
    if (
        _PLAIN.fullmatch(text)
        and "..." not in text
        and ".(" not in text
        and "cent" not in text.lower()
    ):
        return text
    text = _FRAC.sub(_plain_fraction, plain_characters(text))
    text = _REPEATED.sub(_repeated, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def find_numbers(text: str) -> list[Number]:
    """The numbers of a cleaned text, in order, unreadable ones included."""
    found = []
    position = 0
    while token := _TOKEN.search(text, position):
        number = _read(text, token)
        found.append(number)
        position = number.end
    return found


def with_unit(text: str, number: Number) -> Number:
    """The number with the measure or currency that stands at it in its cleaned text, if any."""
    before = text[max(0, number.start - 3) : number.start].strip()
    unit = read_unit(before[-1]) if before and before[-1] in CURRENCIES else None
    if unit is None and (match := _UNIT_AFTER.match(text, number.end)):
        words = match[1]
        first = re.split(r"[ /²³]", words)[0]
        square = first in ("square", "cubic")
        if square or (
            is_unit(first) and first != "in" and (len(first) > 1 or first in _LONE_UNITS)
        ):
            unit = read_unit(words)
            unit = None if unit is not None and unit.words else unit
    return number if unit is None else replace(number, unit=unit)


def _read(text: str, token: re.Match[str]) -> Number:
    start, end = token.span()
    digits = token.group()
    if not digits.isdigit():
        digits = _SEPARATORS.sub("", digits)
    value: Fraction | None = None
    whole = "." not in digits
    if len(digits) <= _MAX_DIGITS:
        value = Fraction(int(digits)) if whole else Fraction(digits)
    if exponent := _EXPONENT.match(text, end):
        power = next(group for group in exponent.groups() if group is not None)
        fits = len(power) < 8 and abs(int(power)) <= _MAX_EXPONENT
        value = value * Fraction(10) ** int(power) if fits and value is not None else None
        end = exponent.end()
    elif whole and (mixed := _MIXED.match(text, end)):
        part = _ratio(mixed.group(1), mixed.group(2))
        value = value + part if part is not None and value is not None else None
        end = mixed.end()
    elif whole and (over := _OVER.match(text, end)):
        value = _ratio(digits, over.group(1))
        end = over.end()
    sign, before = _sign(text, start)
    if sign < 0 and value is not None:
        value = -value
    spoiled = (
        _SPOILED_BEFORE.search(text, max(0, before - 12), before)
        or _OTHER_VALUE.search(text, max(0, before - 20), before)
        or _SPOILED_AFTER.match(text, end)
    )
    if spoiled or (not whole and _REPEATING.match(text, end)):
        end = _skip(text, end)
        return Number(None, False, before, end)
    percent = _PERCENT.match(text, end)
    return Number(value, percent is not None, before, percent.end() if percent else end)


def _sign(text: str, start: int) -> tuple[int, int]:
    """The sign before a number and where the signed number starts; an operator is no sign."""
    if start and text[start - 1] in "+-":
        before = text[max(0, start - 12) : start - 1]
        last = before[-1:]
        operator = last.isalnum() or last in (")", "]", "}", "%")
        if last.isspace():
            last = before.rstrip()[-1:]
            operator = last.isdigit() or last in (")", "]", "}", "%")
        if not operator:
            return (-1 if text[start - 1] == "-" else 1), start - 1
    elif gap := _UNARY_GAP.search(text, max(0, start - 12), start):
        return (-1 if gap.group(1) == "-" else 1), gap.start(1)
    elif word := _SIGN_WORD.search(text, max(0, start - 24), start):
        return -1, word.start(word.lastindex or 0)
    return 1, start


def _skip(text: str, end: int) -> int:
    """Where an unreadable number ends, its exponents included."""
    while True:
        junk = _JUNK.match(text, end)
        after = junk.end() if junk else end
        if after == end:
            return end
        end = after
        if text[end : end + 1] == "{":
            close = closing_brace(text, end)
            end = len(text) if close is None else close + 1


def _ratio(above: str, below: str) -> Fraction | None:
    if max(len(above), len(below)) > _MAX_DIGITS or int(below) == 0:
        return None
    return Fraction(int(above), int(below))


def _repeated(match: re.Match[str]) -> str:
    whole, fixed, block = match[1], match[2] or "", match[3] or match[4]
    if block is None:
        found = repeated_block(match[5])
        if found is None:
            return match[0]
        fixed, block = found
    value = repeating_decimal(whole[-50:], fixed[-50:], block)
    return f"{value.numerator}/{value.denominator}" if len(whole + fixed) < 50 else match[0]


def _plain_fraction(match: re.Match[str]) -> str:
    above = match["a"] or match["a1"]
    below = match["b"] or match["b1"]
    return f"{(match['sign'] or ' ').strip() or ' '}{above}/{below} "
