"""Units of measure and currencies at a number: what they are and how they convert.

A unit on one side only is no difference; on both sides the quantities are compared, so
5 m is 500 cm and is not 5 cm. Words that are no known unit are compared as words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100",
        "m meter metre": "1", "km kilometer kilometre": "1000", "in inch inche": "254/10000",
        "ft foot feet": "3048/10000", "yd yard": "9144/10000", "mi mile": "1609344/1000",
    },
    "mass": {
        "mg milligram": "1/1000", "g gram": "1", "kg kilogram": "1000",
        "lb pound": "45359237/100000", "oz ounce": "45359237/1600000",
    },
    "time": {
        "ms millisecond": "1/1000", "s sec second": "1", "min minute": "60", "h hr hour": "3600",
        "day": "86400", "week": "604800", "month": "2629746", "yr year": "31556952",
    },
    "volume": {"ml milliliter millilitre": "1/1000", "l liter litre": "1"},
    "dollar": {"cent ¢ c": "1/100", "＄ $ dollar usd buck": "1"},
    "euro": {"€ eur euro": "1"},
    "sterling": {"£ gbp": "1"},
    "yen": {"¥ jpy yen yuan rmb cny": "1"},
    "rupee": {"₹ rupee rs inr": "1"},
    "degree": {"° deg degree": "1"},
    "celsius": {"°c ℃ celsius": "1"},
    "fahrenheit": {"°f ℉ fahrenheit": "1"},
    "kelvin": {"k kelvin": "1"},
    "radian": {"rad radian": "1"},
    "newton": {"n newton": "1"},
    "joule": {"j joule": "1", "kj kilojoule": "1000"},
    "watt": {"w watt": "1", "kw kilowatt": "1000"},
    "volt": {"v volt": "1"},
    "ampere": {"a ampere amp": "1"},
    "ohm": {"Ω ω ohm": "1"},
    "hertz": {"hz hertz": "1", "khz kilohertz": "1000", "mhz megahertz": "1000000"},
    "mole": {"mol mole": "1"},
}  # fmt: skip
_UNITS = {
    spelling: (dimension, Fraction(factor))
    for dimension, members in _TABLE.items()
    for spellings, factor in members.items()
    for spelling in spellings.split()
}
_COMPOUND = {
    "mph": ("mi", "/", "h"),
    "kmph": ("km", "/", "h"),
    "kph": ("km", "/", "h"),
    "kmh": ("km", "/", "h"),
    "mps": ("m", "/", "s"),
}
CURRENCIES = "＄$€£¥₹"
_WORD = re.compile(r"[A-Za-zΩω°¢℃℉＄$€£¥₹]+\.?|\^\s*\{?\s*(-?\d)\s*\}?|/|[²³]")
_SKIPPED = frozenset({"of", "the", "a", "an", "in", "unit", "total", "exactly", "and"})
_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_RAISED = {"²": 2, "³": 3, "squared": 2, "cubed": 3}
_PLURAL = re.compile(r"(?<=[a-z]{2})s\Z")


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of dimensions, its size in base units, and words that are no known unit."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction
    words: frozenset[str]

    def ratio(self, other: Unit) -> Fraction | None:
        """One of this in the other; None where they do not convert."""
        if self.dimensions != other.dimensions:
            return None
        if not (self.words <= other.words or other.words <= self.words):
            return None
        return self.factor / other.factor


def is_unit(word: str) -> bool:
    """Whether one word is a known unit."""
    return _known(word) is not None or word.lower() in _COMPOUND


@lru_cache(maxsize=2048)
def read_unit(text: str) -> Unit | None:
    """The unit that a text names; None where it names none ("units", blanks, over-long)."""
    return _Product(text).unit() if len(text) <= 60 else None


class _Product:
    """Collects the factors of a unit, from left to right."""

    def __init__(self, text: str) -> None:
        self._dimensions: dict[str, int] = {}
        self._factor = Fraction(1)
        self._words: set[str] = set()
        self._sign = self._power = 1
        self._last: tuple[str, Fraction, int] | None = None
        for match in _WORD.finditer(text):
            self._add(match.group().rstrip("."), match[1])

    def unit(self) -> Unit | None:
        volume = self._dimensions.pop("volume", 0)  # a litre is a thousandth of a cubic metre
        if volume:
            self._multiply("length", Fraction(1), 3 * volume)
            self._factor /= Fraction(1000) ** volume
        kept = tuple(sorted((name, power) for name, power in self._dimensions.items() if power))
        return Unit(kept, self._factor, frozenset(self._words)) if kept or self._words else None

    def _add(self, token: str, exponent: str | None) -> None:
        lower = token.lower()
        raised = int(exponent) if exponent else _RAISED.get(lower)
        if token == "/" or lower in ("per", "p"):
            self._sign = -1
        elif raised is not None:
            if self._last is not None:
                dimension, size, times = self._last
                self._multiply(dimension, size, times * (raised - 1))
        elif lower in _POWER_WORDS:
            self._power = _POWER_WORDS[lower]
        elif lower in _COMPOUND:
            for part in _COMPOUND[lower]:
                self._add(part, None)
        elif (known := _known(token)) is not None:
            self._last = (*known, self._sign * self._power)
            self._multiply(*self._last)
            self._sign = self._power = 1
        elif (plain := _PLURAL.sub("", lower)) not in _SKIPPED:
            self._words.add(plain)

    def _multiply(self, dimension: str, size: Fraction, times: int) -> None:
        self._dimensions[dimension] = self._dimensions.get(dimension, 0) + times
        self._factor *= size**times


def _known(word: str) -> tuple[str, Fraction] | None:
    lower = word.lower().rstrip(".")
    return _UNITS.get(lower) or _UNITS.get(_PLURAL.sub("", lower))
