"""An expression with what stands at it: a currency, a percent sign, a unit. Unreadable: none."""

from __future__ import annotations

import re
from typing import Any

from services.reward.grading.maths.expressions import read_expression
from services.reward.grading.maths.shapes import Quantity
from services.reward.grading.maths.sizes import Unreadable
from services.reward.grading.units import CURRENCIES, Unit, is_unit, read_unit

_PREFIXED = re.compile(rf"([-+]?)\s*([{CURRENCIES}])\s*(.*)")
_SUFFIXED = re.compile(
    rf"(.*?)\s*((?:(?:⟦[^⟦⟧]*⟧|°|[{CURRENCIES}])(?:\s*\^\s*\{{?\s*-?\d\s*\}}?)?\s*/?\s*)+)"
)
# Words right after a number that make it another number.
_TIMES_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLE = re.compile(rf"(\s*⟦?\s*)({'|'.join(_TIMES_TEN)})\b", re.IGNORECASE)
_OTHER_VALUE = re.compile(r"\s*⟦?\s*(?:dozen|squared|cubed|factorial|times)\b", re.IGNORECASE)
_SPELT = re.compile(r"(.*[\d)}π])(\s*)([A-Za-z][A-Za-z./ ]*(?:\^\{?\d\}?)?)")


def quantity(text: str) -> Quantity:
    """An expression, perhaps with a currency, a percent sign or a unit at it."""
    unit: Unit | None = None
    percent = False
    text = _multiplied(text)
    if prefixed := _PREFIXED.fullmatch(text):
        unit, text = read_unit(prefixed[2]), prefixed[1] + prefixed[3]
    elif suffixed := _SUFFIXED.fullmatch(text):
        unit, text = read_unit(suffixed[2]), suffixed[1]
    elif (spelt := _SPELT.fullmatch(text)) and _spells_unit(spelt[2], spelt[3]):
        unit, text = read_unit(spelt[3]), spelt[1]
    if text.endswith("%"):
        percent, text = True, text[:-1]
    return Quantity(read_expression(text), percent, unit)


def _multiplied(text: str) -> str:
    """5 million as 5*10^{6}. Unreadable: a word at a number that says another one (5 squared)."""
    number = re.match(rf"[-+]?\s*[{CURRENCIES}]?\s*[\d.,]*\d", text)
    if number is None:
        return text
    if _OTHER_VALUE.match(text, number.end()):
        raise Unreadable("a number in words")
    if not (word := _MULTIPLE.match(text, number.end())):
        return text
    rest = re.sub(r"⟦\s*⟧", "", word[1] + text[word.end() :])
    return f"{number[0]}*10^{{{_TIMES_TEN[word[2].lower()]}}}{rest}"


def plain(text: str) -> Any:
    """The value of an expression that has neither a unit nor a percent sign."""
    shape = quantity(text)
    if shape.unit is not None or shape.percent:
        raise Unreadable("a unit in a relation")
    return shape.value


def _spells_unit(blank: str, words: str) -> bool:
    first = re.split(r"[ ./^]", words)[0]
    if len(first) == 1:
        return bool(blank) and is_unit(first) and first not in "acAC"
    return (is_unit(first) and len(first) > 1) or (bool(blank) and len(first) > 2)
