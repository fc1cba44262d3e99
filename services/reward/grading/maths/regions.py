"""Intervals, unions and bounds as sets of real numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import sympy

from services.reward.grading.maths.shapes import Quantity, Region, Relation, Several, Shape
from services.reward.grading.maths.sizes import Unreadable
from services.reward.grading.maths.values import number_of, same_value

_LETTER = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?")
_TURNED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}


def interval(items: Sequence[Shape], opening: str, closing: str) -> Any:
    """The interval of two ends in brackets; None where it is none."""
    if len(items) != 2 or not all(isinstance(i, Quantity) and _is_plain(i) for i in items):
        return None
    low, high = (item.value for item in items if isinstance(item, Quantity))
    below, above = number_of(low), number_of(high)
    if below is None or above is None or not below < above:
        return None
    return sympy.Interval(low, high, opening == "(", closing == ")")


def region_of(shape: Shape) -> Any:
    """A shape as a set of real numbers; None where it is none."""
    if isinstance(shape, Region):
        return shape.points
    if isinstance(shape, Several) and shape.kind == "tuple":
        return interval(shape.items, shape.brackets[0], shape.brackets[1])
    if isinstance(shape, Several) and shape.kind in ("set", "list"):
        values = [i.value for i in shape.items if isinstance(i, Quantity) and _is_plain(i)]
        if len(values) == len(shape.items) and all(
            number_of(value) is not None for value in values
        ):
            return sympy.FiniteSet(*values)
    return None


def bound(values: Sequence[Any], operators: Sequence[str], texts: Sequence[str]) -> Shape:
    """x > 2, 1 < x ≤ 3, 2x + 1 < 5: a region of one letter, or else a relation."""
    if len(values) == 2:
        left, right = values
        if left.is_number and right.is_number:
            raise Unreadable("a bound without a letter")
        solved = _solved(left - right, operators[0])
        return solved if solved is not None else _relation(left, operators[0], right)
    if len(values) != 3 or not (set(operators) <= {"<", "≤"} or set(operators) <= {">", "≥"}):
        raise Unreadable("a chain of other signs")
    low = bound(values[:2], operators[:1], texts[:2])
    high = bound(values[1:], operators[1:], texts[1:])
    if not isinstance(low, Region) or not isinstance(high, Region) or low.name != high.name:
        raise Unreadable("a chain around no letter")
    return Region(sympy.Intersection(low.points, high.points), low.name)


def same_region(gold: Any, answer: Any) -> bool:
    """Whether two sets of real numbers are the same, ends compared as values."""
    if gold == answer:
        return True
    left, right = _pieces(gold), _pieces(answer)
    if left is None or right is None or len(left) != len(right):
        return False
    return all(
        a.left_open == b.left_open
        and a.right_open == b.right_open
        and same_value(a.start, b.start)
        and same_value(a.end, b.end)
        for a, b in zip(left, right, strict=True)
    )


def _pieces(points: Any) -> list[Any] | None:
    parts = points.args if isinstance(points, sympy.Union) else (points,)
    pieces: list[Any] = []
    for part in parts:
        if isinstance(part, sympy.FiniteSet):
            pieces += [sympy.Interval(value, value) for value in part.args]
        elif isinstance(part, sympy.Interval):
            pieces.append(part)
        else:
            return None
    flat = [p if isinstance(p, sympy.Interval) else _Point(p.args[0]) for p in pieces]
    places = [number_of(piece.start) for piece in flat]
    if any(place is None for place in places):
        return None
    return [flat[i] for i in sorted(range(len(flat)), key=lambda i: places[i])]


class _Point:
    """One number, as the interval from itself to itself."""

    left_open = right_open = False

    def __init__(self, value: Any) -> None:
        self.start = self.end = value


def _is_plain(quantity: Quantity) -> bool:
    return not quantity.percent and quantity.name is None


def _solved(difference: Any, operator: str) -> Region | None:
    """A difference that is linear in one letter, compared with zero."""
    symbols = difference.free_symbols
    if len(symbols) != 1:
        return None
    symbol = symbols.pop()
    if difference.has(sympy.oo) or not difference.is_polynomial(symbol):
        return None
    at_zero = difference.subs(symbol, 0)
    slope = difference.subs(symbol, 1) - at_zero
    if not slope.is_number or not same_value(difference, slope * symbol + at_zero):
        return None
    steepness, place = number_of(slope), -at_zero / slope if slope != 0 else None
    if not steepness or place is None or number_of(place) is None:
        return None
    if steepness < 0:
        operator = _TURNED[operator]
    return Region(_half_line(place, operator), symbol.name)


def _half_line(place: Any, operator: str) -> Any:
    if operator == "≠":
        return sympy.S.Reals - sympy.FiniteSet(place)
    if operator in "<≤":
        return sympy.Interval(-sympy.oo, place, True, operator == "<")
    return sympy.Interval(place, sympy.oo, operator == ">", True)


def _relation(left: Any, operator: str, right: Any) -> Relation:
    if operator in ">≥":
        left, right, operator = right, left, _TURNED[operator]
    kind = operator
    assert kind in ("<", "≤", "≠")
    return Relation(left - right, "<" if kind == "<" else "≤" if kind == "≤" else "≠")
