"""Whether an answer's shape is the right one's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from services.reward.grading.maths.expressions import read_expression
from services.reward.grading.maths.notation import key, tidy
from services.reward.grading.maths.regions import region_of, same_region
from services.reward.grading.maths.shapes import (
    Based,
    Grid,
    Quantity,
    Region,
    Relation,
    Several,
    Shape,
    Words,
)
from services.reward.grading.maths.sizes import TooLarge, Unreadable
from services.reward.grading.maths.values import close_value, same_value


@dataclass(frozen=True, slots=True)
class Margins:
    """How far a real constant may be off; and how a percent sign is read (see `numeric`)."""

    abs_tol: float = 0.0
    rel_tol: float = 0.0
    percent: str = "either"


def same(gold: Shape, answer: Shape, margins: Margins) -> bool:
    """Whether both are the same answer; see docs/graders.md for what counts as the same."""
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return _same_quantity(gold, answer, margins)
    if isinstance(gold, Several) and len(gold.items) == 1 and isinstance(answer, Quantity):
        return same(gold.items[0], answer, margins)
    if isinstance(gold, Grid) or isinstance(answer, Grid):
        return _same_grid(gold, answer, margins)
    if isinstance(gold, Region) or isinstance(answer, Region):
        return _same_region(gold, answer)
    if isinstance(gold, Several) and isinstance(answer, Several):
        return _same_several(gold, answer, margins)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relation(_as_relation(gold), _as_relation(answer))
    if isinstance(gold, Based) and isinstance(answer, Based):
        return gold == answer
    return _same_words(gold, answer, margins)


def _same_words(gold: Shape, answer: Shape, margins: Margins) -> bool:
    if isinstance(gold, Words) and isinstance(answer, Words):
        return bool(_letters(gold.text)) and _letters(gold.text) == _letters(answer.text)
    if isinstance(gold, Words) and isinstance(answer, Quantity):
        return _spelt_product(gold, answer, margins)
    if isinstance(gold, Quantity) and isinstance(answer, Words):
        return _spelt_product(answer, gold, margins)
    return False


def _same_quantity(gold: Quantity, answer: Quantity, margins: Margins) -> bool:
    if gold.name is not None and answer.name is not None and gold.name != answer.name:
        return _same_relation(_as_relation(gold), _as_relation(answer))
    right, given = gold.value, answer.value
    if gold.unit is not None and answer.unit is not None:
        ratio = answer.unit.ratio(gold.unit)
        if ratio is None:
            return False
        given = given * _sympy(ratio)
    if gold.percent == answer.percent:
        return _close(right, given, margins)
    return _same_percent(right, given, gold.percent, margins)


def _same_percent(right: Any, given: Any, gold_has_it: bool, margins: Margins) -> bool:
    if right.free_symbols or given.free_symbols:
        return False
    if margins.percent in ("either", "value"):
        scaled = (right / 100, given) if gold_has_it else (right, given / 100)
        if _close(*scaled, margins):
            return True
    bare = given if gold_has_it else right
    beyond = bare.is_Rational and abs(bare) > 1
    by_unit = margins.percent == "unit" or (margins.percent == "either" and beyond)
    return by_unit and _close(right, given, margins)


def _close(right: Any, given: Any, margins: Margins) -> bool:
    if same_value(right, given):
        return True
    if not margins.abs_tol and not margins.rel_tol:
        return False
    if right.free_symbols or given.free_symbols:
        return False
    return close_value(right, given, margins.abs_tol, margins.rel_tol)


def _same_several(gold: Several, answer: Several, margins: Margins) -> bool:
    if gold.kind == "assignments" or answer.kind == "assignments":
        return _same_assignments(gold, answer, margins)
    tuples = (gold.kind == "tuple") + (answer.kind == "tuple")
    if tuples == 2:
        brackets = {gold.brackets, answer.brackets}
        if len(brackets) > 1 and len(gold.items) == 2:
            return False
        return _in_order(gold.items, answer.items, margins)
    if tuples == 1:
        kinds = {gold.kind, answer.kind}
        pair = gold.brackets + answer.brackets
        return "list" in kinds and pair == "()" and _in_order(gold.items, answer.items, margins)
    left, right = list(gold.items), list(answer.items)
    if "set" in (gold.kind, answer.kind):
        left, right = _distinct(left, margins), _distinct(right, margins)
    return _in_any_order(left, right, margins)


def _same_assignments(gold: Several, answer: Several, margins: Margins) -> bool:
    """x = 1, y = 2 against the same in any order, or against (1, 2)."""
    if gold.kind == answer.kind:
        return _in_order(gold.items, answer.items, margins)
    named, other = (gold, answer) if gold.kind == "assignments" else (answer, gold)
    names = [item.name or "" for item in named.items if isinstance(item, Quantity)]
    if other.brackets == "" and len({re.sub(r"_\{?\d+\}?", "", name) for name in names}) == 1:
        items = [replace(i, name=None) for i in named.items if isinstance(i, Quantity)]
        return _in_any_order(items, other.items, margins)  # x_1 = 2, x_2 = 3 are 2 and 3
    return other.brackets in ("()",) and _in_order(gold.items, answer.items, margins)


def _in_order(left: Sequence[Shape], right: Sequence[Shape], margins: Margins) -> bool:
    return len(left) == len(right) and all(
        same(a, b, margins) for a, b in zip(left, right, strict=True)
    )


def _in_any_order(left: Sequence[Shape], right: Sequence[Shape], margins: Margins) -> bool:
    if len(left) != len(right):
        return False
    open_items = list(right)
    for item in left:
        match = next((other for other in open_items if same(item, other, margins)), None)
        if match is None:
            return False
        open_items.remove(match)
    return True


def _distinct(items: Sequence[Shape], margins: Margins) -> list[Shape]:
    kept: list[Shape] = []
    for item in items:
        if not any(same(item, other, margins) for other in kept):
            kept.append(item)
    return kept


def _same_grid(gold: Shape, answer: Shape, margins: Margins) -> bool:
    rows, others = _rows(gold), _rows(answer)
    if rows is None or others is None or len(rows) != len(others):
        return False
    return all(_in_order(a, b, margins) for a, b in zip(rows, others, strict=True))


def _rows(shape: Shape) -> Sequence[Sequence[Shape]] | None:
    """A matrix row by row; a tuple is the column vector of its entries."""
    if isinstance(shape, Grid):
        return shape.rows
    if isinstance(shape, Several) and shape.kind == "tuple" and shape.brackets == "()":
        return [[item] for item in shape.items]
    return None


def _same_region(gold: Shape, answer: Shape) -> bool:
    left, right = region_of(gold), region_of(answer)
    if left is None or right is None:
        return False
    names = {shape.name for shape in (gold, answer) if isinstance(shape, Region) and shape.name}
    return len(names) < 2 and same_region(left, right)


def _same_relation(gold: Relation | None, answer: Relation | None) -> bool:
    """Whether one is the other times a constant (a positive one, unless both are = or ≠)."""
    if gold is None or answer is None or gold.operator != answer.operator:
        return False
    left, right = gold.difference, answer.difference
    if left.free_symbols != right.free_symbols or not left.free_symbols:
        return False
    for number in (3, 5, 7, 11):
        point = {symbol: number + 4 * i for i, symbol in enumerate(_in_name_order(left))}
        below, above = left.subs(point), right.subs(point)
        if below != 0 and above != 0 and below.is_Rational and above.is_Rational:
            ratio = above / below
            signs_matter = gold.operator in ("<", "≤")
            return not (signs_matter and ratio < 0) and same_value(left * ratio, right)
    return same_value(left, right)


def _as_relation(shape: Shape) -> Relation | None:
    """A relation; y = 2x as an equation; None for what is neither."""
    if isinstance(shape, Relation):
        return shape
    if not isinstance(shape, Quantity) or shape.name is None:
        return None
    try:
        return Relation(read_expression(tidy(shape.name)) - shape.value, "=")
    except (Unreadable, TooLarge):
        return None


def _spelt_product(words: Words, quantity: Quantity, margins: Margins) -> bool:
    """`abc` reads as a word; beside a·b·c it is a product."""
    if not words.text.isalpha() or len(words.text) > 6:
        return False
    try:
        value = read_expression(words.text)
    except (Unreadable, TooLarge):
        return False
    return same(Quantity(value), replace(quantity, name=None), margins)


def _in_name_order(value: Any) -> list[Any]:
    return sorted(value.free_symbols, key=lambda symbol: str(symbol.name))


def _letters(text: str) -> str:
    return " ".join(key(text).casefold().strip(".!?()").split())


def _sympy(ratio: Any) -> Any:
    return sympy.Rational(ratio.numerator, ratio.denominator)
