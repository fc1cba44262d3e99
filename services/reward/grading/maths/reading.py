"""From a tidied text to the shape it describes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import sympy

from services.reward.grading.maths.quantities import plain, quantity
from services.reward.grading.maths.regions import bound, interval, region_of
from services.reward.grading.maths.scan import listed, outside, split, wrapped
from services.reward.grading.maths.shapes import (
    Based,
    Grid,
    Opaque,
    Quantity,
    Region,
    Relation,
    Several,
    Shape,
    Words,
)
from services.reward.grading.maths.sizes import TooLarge, Unreadable
from services.reward.grading.maths.values import same_value
from services.reward.grading.units import CURRENCIES

MAX_LENGTH = 2000
_MAX_ITEMS = 100
_MAX_DEPTH = 8

_THOUSANDS = re.compile(
    rf"[-+]?[{CURRENCIES}]?\s?\d{{1,3}}(?:,\d{{3}})+(?![\d,])(?:\.\d+)?"
    r"(?:\s*%|\s*⟦[^⟧]*⟧|\s+[A-Za-z][a-z]+)?"
)
_SPACED = re.compile(r"(?<![\d.^])\d{1,3}(?: \d{3})+(?!\d|\s*/)")
_HEADING = re.compile(r"^⟦[^⟦⟧]*:\s*⟧\s*(?=\S)")
_RELATION = "=<>≤≥≠≈"
_WORD = re.compile(r"⟦([^⟦⟧]*)⟧|([A-Za-z][A-Za-z'-]{2,}(?:[ ,]+[A-Za-z'-]+)*[.!?]?|[Nn]o)")
_NAME = re.compile(
    r"(?:⟦[^⟦⟧]*⟧|\\?[A-Za-z]+'?(?:_(?:\{[^{}]*\}|\w))?)(?:\s*\([^()]*\))?"
    r"|\\(?:angle|triangle|overline|bar)\s*\{?\s*[A-Z]+\s*\}?|\|[A-Z]+\||\([a-z](?:,\s*[a-z])+\)"
)
_TOTAL = re.compile(r"[A-Za-z](?:\^\{?\d\}?)?(?:\s*[+*]?\s*[A-Za-z](?:\^\{?\d\}?)?)+")
_BASED = re.compile(
    r"([0-9A-Fa-f][0-9A-Fa-f ]*)"
    r"(?:_\s*\{?\s*(\d{1,2}|⟦[^⟦⟧]*⟧)\s*\}?|\s*[⟦(]+\s*(?:in )?base (\w+)\s*[⟧)]+)"
)
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16,
}  # fmt: skip
_SETS: dict[str, Any] = {"⟪R⟫": sympy.S.Reals, "∅": sympy.S.EmptySet}
_MATRIX = re.compile(
    r"\\begin\{([pbB]?|small)matrix\}(.*)\\end\{\1matrix\}"
    r"|[(\[]\s*\\begin\{array\}\{[^{}]*\}(.*)\\end\{array\}\s*[)\]]"
)
_BUILDER = re.compile(r"([A-Za-z])\s*(?:∈\s*⟪R⟫)?\s*[|:]\s*(.*)")
_OUTSIDE_IN = re.compile(r"(?:(\])([^\[\]]*)([\[\]])|(\[)([^\[\]]*)(\[))")
_MEMBER = re.compile(r"[A-Za-z](?:_\w)?\s*∈\s*(.*)")


@lru_cache(maxsize=4096)
def read(text: str, thousands: bool = True) -> Shape:
    """The shape of a tidied text. `thousands`: 1,234 is a number and not two."""
    if len(text) > MAX_LENGTH:
        return Opaque(text)
    return _read(text, thousands, 0)


def readings(text: str) -> list[Shape]:
    """All shapes a text may have: 1,234 may be two numbers."""
    first = read(text)
    return [first, read(text, False)] if _THOUSANDS.fullmatch(text) else [first]


def _read(text: str, thousands: bool, depth: int) -> Shape:
    if depth > _MAX_DEPTH:
        return Opaque(text)
    try:
        return _shape(text.strip(), thousands, depth)
    except TooLarge:
        return Opaque(text, large=True)
    except Unreadable:
        return Opaque(text)


def _shape(text: str, thousands: bool, depth: int) -> Shape:
    if not text:
        return Words("")
    if thousands and _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    text = _SPACED.sub(lambda match: match[0].replace(" ", ""), text)
    if word := _WORD.fullmatch(text):
        return Words((word[1] or word[2]).strip(" .!?"))
    if based := _BASED.fullmatch(text):
        return _based(based)
    text = _HEADING.sub("", text)
    pieces, said = listed(text)
    if len(pieces) > 1:
        return _several(pieces, said, thousands, depth)
    if member := _MEMBER.fullmatch(text):
        return _read(member[1], thousands, depth + 1)
    return _joined(text, thousands, depth)


def _joined(text: str, thousands: bool, depth: int) -> Shape:
    """What is no list: a matrix, a region, a relation, something in brackets, a quantity."""
    if matrix := _MATRIX.fullmatch(text):
        return _grid(matrix[2] if matrix[2] is not None else matrix[3], depth)
    marks = {character for _, character in outside(text)}
    if marks & set("∪∖∩") or text in _SETS:
        return _region(text, depth)
    if marks & set(_RELATION):
        return _relation(text, thousands, depth)
    if "±" in text or "∓" in text:
        return _both_signs(text, thousands, depth)
    if turned := _OUTSIDE_IN.fullmatch(text):  # ]1, 2[ is (1, 2)
        opening, inside, closing = (turned[i] or turned[i + 3] for i in (1, 2, 3))
        opening, closing = "(" if opening == "]" else "[", ")" if closing == "[" else "]"
        return _bracketed(opening, inside, closing, depth)
    held = wrapped(text)
    return quantity(text) if held is None else _bracketed(*held, depth)


def _based(match: re.Match[str]) -> Shape:
    name = (match[2] or match[3]).strip("⟦⟧ ").lower()
    base = _BASES.get(name) or (int(name) if name.isdigit() else 0)
    digits = match[1].replace(" ", "").upper().lstrip("0") or "0"
    if not 2 <= base <= 36:
        raise Unreadable("no base")
    if base == 10 and digits.isdigit():
        return quantity(digits)
    return Based(digits, base)


def _several(pieces: Sequence[str], said: str, thousands: bool, depth: int) -> Shape:
    if len(pieces) > _MAX_ITEMS:
        raise Unreadable("too many")
    items = [_read(piece, thousands, depth + 1) for piece in pieces]
    if any(isinstance(item, Opaque) for item in items):
        large = any(isinstance(item, Opaque) and item.large for item in items)
        return Opaque(",".join(pieces), large)
    regions = [item for item in items if isinstance(item, Region)]
    if len(regions) == len(items):
        together = sympy.Union if said == "or" else sympy.Intersection
        bounds = {region.name for region in regions}
        if len(bounds) == 1 and (said or None not in bounds):
            return Region(together(*(region.points for region in regions)), bounds.pop())
    return Several(*_named(items))


def _named(items: list[Shape]) -> tuple[tuple[Shape, ...], Literal["list", "assignments"]]:
    """x = 1, 2 and x = 1, x = 2 are lists; x = 1, y = 2 gives each letter its value."""
    names = [item.name if isinstance(item, Quantity) else None for item in items]
    given = [name for name in names if name is not None]
    if len(given) == len(items) and len(set(given)) == len(given):
        order = sorted(range(len(items)), key=lambda i: given[i])
        return tuple(items[i] for i in order), "assignments"
    if len(set(given)) == 1 and names[0] is not None:
        items = [replace(i, name=None) if isinstance(i, Quantity) else i for i in items]
    return tuple(items), "list"


def _grid(inside: str, depth: int) -> Shape:
    rows = [row for row in inside.split("⏎") if row.strip()]
    cells = tuple(
        tuple(_read(cell.strip(), False, depth + 1) for _, cell in split(row, "&")) for row in rows
    )
    if not cells or len({len(row) for row in cells}) != 1:
        raise Unreadable("rows of different lengths")
    return Grid(cells)


def _region(text: str, depth: int) -> Shape:
    """Unions, differences and intersections, from left to right."""
    total: Any = None
    for operator, piece in split(text, "∪∖∩"):
        part = region_of(_read(piece, False, depth + 1)) if piece not in _SETS else _SETS[piece]
        if part is None:
            raise Unreadable("no region")
        if total is None:
            total = part
        elif operator == "∪":
            total = sympy.Union(total, part)
        else:
            total = total - part if operator == "∖" else sympy.Intersection(total, part)
    return Region(total)


def _relation(text: str, thousands: bool, depth: int) -> Shape:
    pieces = split(text, _RELATION)
    operators = [operator for operator, _ in pieces[1:]]
    sides = [side for _, side in pieces]
    if set(operators) <= {"=", "≈"}:
        return _equal_sides(sides, operators, thousands, depth)
    if not all(sides):
        raise Unreadable("a relation without a side")
    return bound([plain(side) for side in sides], operators, [side.strip() for side in sides])


def _equal_sides(sides: list[str], operators: list[str], thousands: bool, depth: int) -> Shape:
    if "≈" in operators[1:]:  # what follows is rounded
        cut = operators.index("≈", 1)
        sides, operators = sides[: cut + 1], operators[:cut]
    name = None
    if _NAME.fullmatch(sides[0]) or (_TOTAL.fullmatch(sides[0]) and len(sides) == 2):
        name = re.sub(r"[\s⟦⟧]", "", sides[0])
        sides = sides[1:]
    elif operators[0] == "≈":
        return _read(sides[0], thousands, depth + 1)
    shapes = [_read(side, thousands, depth + 1) for side in sides]
    first = shapes[0]
    values = [shape.value for shape in shapes if isinstance(shape, Quantity)]
    if len(values) != len(shapes):
        if len(shapes) == 1 and name is not None:
            return replace(first, name=name) if isinstance(first, Region) else first
        raise Unreadable("an equation of what is no expression")
    assert isinstance(first, Quantity)
    is_total = name is not None and _TOTAL.fullmatch(name) and not _NAME.fullmatch(name)
    if name is not None and is_total and values[0].free_symbols:
        return Relation(plain(name) - values[0], "=")  # x + y = 7 tells a total, x + y = z not
    if all(same_value(values[0], value) for value in values[1:]):
        last = shapes[-1]
        assert isinstance(last, Quantity)
        return replace(last, name=name)
    if len(values) == 2 and name is None:
        return Relation(values[0] - values[1], "=")
    raise Unreadable("sides that are not equal")


def _both_signs(text: str, thousands: bool, depth: int) -> Shape:
    if text.count("±") + text.count("∓") > 1 and text.count("±") != 1:
        raise Unreadable("signs that vary on their own")
    plus, minus = (
        text.translate({ord("±"): upper, ord("∓"): lower}) for upper, lower in ("+-", "-+")
    )
    items = tuple(_read(side, thousands, depth + 1) for side in (plus, minus))
    if any(isinstance(item, Opaque) for item in items):
        raise Unreadable("unreadable with either sign")
    return Several(items, "list")


def _bracketed(opening: str, inside: str, closing: str, depth: int) -> Shape:
    if opening in "⦃{" and (builder := _BUILDER.fullmatch(inside)):
        return _read(builder[2], False, depth + 1)
    pieces = [piece for _, piece in split(inside, ",;")]
    if opening in "⌊⌈":
        return quantity(opening + inside + closing)
    if len(pieces) == 1 and opening != "⦃":
        if opening == "⟦":
            return Words(inside)
        return _read(inside, True, depth + 1)
    if not all(pieces) or len(pieces) > _MAX_ITEMS:
        raise Unreadable("brackets with a gap")
    items = tuple(_read(piece, False, depth + 1) for piece in pieces)
    if any(isinstance(item, Opaque) for item in items):
        raise Unreadable("brackets around what is unreadable")
    if opening in "⦃{":
        return Several(items, "set")
    if opening == "⟨":
        opening, closing = "(", ")"
    if opening + closing in ("[)", "(]"):
        made = interval(items, opening, closing)
        if made is None:
            raise Unreadable("no interval")
        return Region(made)
    return Several(items, "tuple", opening + closing)
