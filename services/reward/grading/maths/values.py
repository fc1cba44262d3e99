"""Are two expressions the same number, or the same function of their letters?

Rational numbers are compared exactly. Everything else is evaluated at fixed points with
far more digits than the numbers in it have: how many grows with the digits of those
numbers and with the range of all intermediate values, so that neither a tiny difference
nor cancellation is mistaken for equality. That takes milliseconds, where proving it by
simplification may take for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
import sympy

from services.reward.grading.maths.sizes import digits_of

_MAX_RANGE = 2000  # decimal orders of magnitude within one evaluation
_MAX_SYMBOLS = 16
_ENOUGH_POINTS = 6
_FEWEST_POINTS = 3
# Each row of points: from, to, whether signs vary.
_REGIONS = [
    (0.2, 0.9, False), (1.1, 6.0, True), (0.1, 0.95, True), (2.0, 9.0, False), (0.2, 0.9, True),
    (20.0, 90.0, True), (1.0, 30.0, False), (100.0, 900.0, False), (1.1, 5.0, True),
    (0.1, 0.9, True), (3.0, 300.0, True), (1000.0, 5000.0, True),
]  # fmt: skip


class _Undefined(Exception):
    """The expression has no value at this point."""


def same_value(gold: Any, answer: Any) -> bool:
    """Whether the two are equal wherever both are defined (among real numbers, if at all)."""
    if gold == answer:
        return True
    if gold.is_Rational and answer.is_Rational:
        return False
    if gold.has(*_IMPROPER) or answer.has(*_IMPROPER):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=lambda symbol: symbol.name)
    if len(symbols) > _MAX_SYMBOLS:
        return False
    total = sum(digits_of(number) for number in gold.atoms(sympy.Rational))
    total += sum(digits_of(number) for number in answer.atoms(sympy.Rational))
    if total > _MAX_RANGE:
        return False
    imaginary = gold.has(sympy.I) or answer.has(sympy.I)
    if not symbols:
        return any(
            _agree(gold, answer, {}, total, real) is True
            for real in ((False,) if imaginary else (True, False))
        )
    for real in (False,) if imaginary else (True, False):
        agreed = 0
        for point in _points(len(symbols)):
            verdict = _agree(gold, answer, dict(zip(symbols, point, strict=True)), total, real)
            if verdict is False:
                return False
            agreed += verdict is True
            if agreed == _ENOUGH_POINTS:
                return True
        if agreed >= _FEWEST_POINTS:
            return True
    return False


def close_value(gold: Any, answer: Any, abs_tol: float, rel_tol: float) -> bool:
    """Whether two real constants differ by no more than the larger margin."""
    try:
        with mpmath.workdps(40):
            right, given = (_Evaluation({}, True).value(value) for value in (gold, answer))
            margin = max(mpmath.mpf(abs_tol), mpmath.mpf(rel_tol) * abs(right))
            return bool(abs(right - given) <= margin)
    except (_Undefined, ArithmeticError, ValueError, TypeError):
        return False


def number_of(value: Any) -> Any:
    """A real constant as a 30-digit number, for sorting. None where it has none."""
    if value in (sympy.oo, -sympy.oo):
        return mpmath.inf if value == sympy.oo else -mpmath.inf
    try:
        with mpmath.workdps(30):
            return _Evaluation({}, True).value(value)
    except (_Undefined, ArithmeticError, ValueError, TypeError):
        return None


@lru_cache(maxsize=_MAX_SYMBOLS)
def _points(count: int) -> list[list[Fraction]]:
    points = []
    for row, (low, high, varied) in enumerate(_REGIONS):
        source = random.Random(7919 * row + count)
        point = []
        for _ in range(count):
            value = Fraction(round(source.uniform(low, high) * 9973), 9973)
            point.append(-value if varied and source.random() < 0.5 else value)
        points.append(point)
    return points


def _agree(
    gold: Any, answer: Any, point: Mapping[Any, Fraction], digits: float, real: bool
) -> bool | None:
    """Whether both have the same value at a point; None where one of them has none there."""
    try:
        with mpmath.workdps(30):
            rough = _Evaluation(point, real)
            left, right = rough.value(gold), rough.value(answer)
            if abs(left - right) > mpmath.mpf(10) ** -8 * max(1, abs(left), abs(right)):
                return False
        if rough.range > _MAX_RANGE:
            return False
        with mpmath.workdps(50 + int(3 * digits + 4 * rough.range)):
            exact = _Evaluation(point, real)
            left, right = exact.value(gold), exact.value(answer)
            margin = mpmath.mpf(10) ** -int(25 + 1.5 * (digits + rough.range))
            return bool(abs(left - right) <= margin * max(1, abs(left), abs(right)))
    except (_Undefined, ArithmeticError, ValueError, TypeError):
        return None


class _Evaluation:
    """Evaluates expressions at one point; `range` is how far intermediate values spread."""

    def __init__(self, point: Mapping[Any, Fraction], real: bool) -> None:
        self._point = {s: mpmath.mpf(v.numerator) / v.denominator for s, v in point.items()}
        self._real = real
        self.range = 0.0

    def value(self, node: Any) -> Any:
        """The value of a node."""
        result = self._value(node)
        if self._real and isinstance(result, mpmath.mpc):
            raise _Undefined
        if not mpmath.isfinite(result):
            raise _Undefined
        if result:
            self.range = max(self.range, float(abs(mpmath.log10(abs(result)))))
        return result

    def _value(self, node: Any) -> Any:
        if node.is_Symbol:
            return self._point[node]
        if node.is_Rational:
            return mpmath.mpf(node.p) / node.q
        constant = _CONSTANTS.get(node)
        if constant is not None:
            return +constant
        if node is sympy.I:
            return mpmath.mpc(0, 1)
        if node.is_Add:
            return sum((self.value(arg) for arg in node.args), mpmath.mpf(0))
        if node.is_Mul:
            product = mpmath.mpf(1)
            for arg in node.args:
                product *= self.value(arg)
            return product
        if node.is_Pow:
            return self._power(*node.args)
        function = _FUNCTIONS.get(node.func)
        if function is None:
            raise _Undefined
        arguments = [self.value(arg) for arg in node.args]
        if self._real and node.func is sympy.log and arguments[0] <= 0:
            raise _Undefined
        return function(*arguments)

    def _power(self, base: Any, exponent: Any) -> Any:
        below = self.value(base)
        if exponent.is_Integer:
            if not below and exponent < 0:
                raise _Undefined
            return below ** int(exponent)
        above = self.value(exponent)
        if self._real and below < 0:
            raise _Undefined
        if abs(above) > 10**6:
            raise _Undefined
        return below**above


_IMPROPER = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
_CONSTANTS = {sympy.pi: mpmath.mp.pi, sympy.E: mpmath.mp.e}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.exp: mpmath.exp, sympy.log: mpmath.log, sympy.sin: mpmath.sin, sympy.cos: mpmath.cos,
    sympy.tan: mpmath.tan, sympy.cot: mpmath.cot, sympy.sec: mpmath.sec, sympy.csc: mpmath.csc,
    sympy.asin: mpmath.asin, sympy.acos: mpmath.acos, sympy.atan: mpmath.atan,
    sympy.sinh: mpmath.sinh, sympy.cosh: mpmath.cosh, sympy.tanh: mpmath.tanh,
    sympy.Abs: abs, sympy.floor: mpmath.floor, sympy.ceiling: mpmath.ceil,
    sympy.factorial: lambda x: mpmath.gamma(x + 1), sympy.binomial: mpmath.binomial,
    sympy.re: mpmath.re, sympy.im: mpmath.im, sympy.arg: mpmath.arg, sympy.conjugate: mpmath.conj,
    sympy.sign: mpmath.sign, sympy.acot: mpmath.acot, sympy.asec: mpmath.asec,
    sympy.acsc: mpmath.acsc, sympy.coth: mpmath.coth,
}  # fmt: skip
