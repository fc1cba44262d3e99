"""Powers, factorials and binomial coefficients, sized before they are computed."""

from __future__ import annotations

import math
from typing import Any

import sympy

MAX_DIGITS = 100_000  # all numbers of one expression together
_MAX_ROOT_DIGITS = 300  # sympy looks for factors under a root
_MAX_FACTORIAL = 2000


class Unreadable(Exception):
    """Not an expression that this module knows."""


class TooLarge(Exception):
    """An expression whose value nobody should compute."""


class Sizes:
    """What one expression may still compute: all its numbers together have `MAX_DIGITS`."""

    def __init__(self) -> None:
        self._left = MAX_DIGITS

    def spend(self, digits: float) -> None:
        """Counts digits that are about to be computed."""
        self._left -= int(digits)
        if self._left < 0:
            raise TooLarge("more digits than anyone computes")

    def divided(self, above: Any, below: Any) -> Any:
        """A quotient."""
        if below == 0:
            raise Unreadable("a division by zero")
        return above / below

    def raised(self, base: Any, exponent: Any) -> Any:
        """A power, sized first."""
        if exponent.is_number and base.is_number and exponent != 0:
            height = _height(exponent)
            if base in (0, 1, -1):
                pass
            elif exponent.is_Integer:
                if height > 18:
                    raise TooLarge("a power")
                self.spend(abs(int(exponent)) * max(1.0, digits_of(base)))
            else:
                if height > 6 or digits_of(base) > _MAX_ROOT_DIGITS:
                    raise TooLarge("a power")
                self.spend(10**height * max(1.0, digits_of(base)))
            if base == 0 and exponent.is_negative:
                raise Unreadable("a division by zero")
        elif exponent.is_number and _height(exponent) > 6:
            raise TooLarge("a power")
        return sympy.Pow(base, exponent)

    def factorial(self, value: Any) -> Any:
        """A factorial, sized first."""
        if value.is_number:
            if not value.is_Integer or value < 0:
                raise Unreadable("a factorial of no whole number")
            if value > _MAX_FACTORIAL:
                raise TooLarge("a factorial")
            self.spend(math.lgamma(int(value) + 1) / math.log(10))
        return sympy.factorial(value)

    def binomial(self, above: Any, below: Any) -> Any:
        """A binomial coefficient, sized first."""
        if above.is_number and below.is_number:
            if not (above.is_Integer and below.is_Integer and above >= 0 and below >= 0):
                raise Unreadable("a binomial coefficient of no whole numbers")
            if digits_of(above) > 15:
                raise TooLarge("a binomial coefficient")
            few = min(int(below), max(0, int(above - below)))
            if few > 5000:
                raise TooLarge("a binomial coefficient")
            self.spend(few * max(1.0, digits_of(above)))
            return sympy.Integer(math.comb(int(above), int(below)))
        return sympy.binomial(above, below)


def digits_of(value: Any) -> float:
    """The decimal digits of the longest number in a value, about; a float never overflows."""
    longest: float = 0.0
    for number in value.atoms(sympy.Rational):
        longest = max(longest, number.p.bit_length() * 0.302, number.q.bit_length() * 0.302)
    return float(longest)


def _height(value: Any) -> float:
    """log10 of a bound on a number's size, found without computing it where it is large."""
    if value.is_Rational:
        return max(0.0, float(abs(value.p).bit_length() - value.q.bit_length() + 1) * 0.302)
    size = abs(sympy.N(value, 15, maxn=60)) if digits_of(value) < _MAX_ROOT_DIGITS else None
    if size is None or not size.is_number or size in (sympy.oo, sympy.nan, sympy.zoo):
        raise TooLarge("a power")
    return math.log10(float(size) + 1) if size < 1e300 else 400.0
