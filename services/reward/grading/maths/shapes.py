"""What an answer is: a quantity, several of them, a region of the line, a matrix, an equation.

`maths/reading.py` makes these from text, `maths/sameness.py` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from services.reward.grading.units import Unit


@dataclass(frozen=True, slots=True)
class Quantity:
    """An expression with what stands around it: `x = 5 cm` has the name x and a unit."""

    value: Any  # a sympy expression
    percent: bool = False
    unit: Unit | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Several:
    """Answers side by side. `list` and `set` have no order; `tuple` has, in its brackets."""

    items: tuple[Shape, ...]
    kind: Literal["list", "set", "tuple", "assignments"]
    brackets: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """A set of real numbers (a sympy set) that an interval, a union or a bound describes."""

    points: Any
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix, row by row."""

    rows: tuple[tuple[Shape, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """`difference` = 0, < 0 or ≤ 0; the side it is on and its scale do not matter."""

    difference: Any
    operator: Literal["=", "<", "≤", "≠"]


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a base other than ten. Comparing values would forgive the wrong base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Words:
    """A text answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """What only its own spelling equals; `large`: because nobody should compute it."""

    text: str
    large: bool = False


Shape = Quantity | Several | Region | Grid | Relation | Based | Words | Opaque
