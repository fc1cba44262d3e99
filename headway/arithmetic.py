"""Arithmetic over named numbers: what a `formula` grader computes.

Python's own parser reads the text, then every node must be one of the few below: nothing is
ever evaluated as Python. Numbers are floats throughout, so no power can grow without end.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from headway.suggestions import near

MAX_CHARACTERS = 1000
_MAX_NODES = 300
_CHARACTERS = re.compile(r"[A-Za-z0-9_\s.,()+\-*/^<>=!]*")

Values = Mapping[str, float]
Compute = Callable[[Values], float]

_OPERATORS: Mapping[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
_COMPARISONS: Mapping[type[ast.AST], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: Mapping[str, tuple[Callable[..., float], int, int]] = {  # least and most arguments
    "min": (lambda *numbers: min(numbers), 1, 32),
    "max": (lambda *numbers: max(numbers), 1, 32),
    "abs": (abs, 1, 1),
    "floor": (lambda x: float(math.floor(x)), 1, 1),
    "ceil": (lambda x: float(math.ceil(x)), 1, 1),
    "exp": (math.exp, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "log": (math.log, 1, 1),
}
_CHOICE = "where"
FUNCTIONS = frozenset(_FUNCTIONS) | {_CHOICE}


class BadFormula(ValueError):
    """A text that is no formula, or uses what a formula may not."""


class CannotCompute(ArithmeticError):
    """A formula without a value for these numbers: a division by zero, a root of -1, too large."""


def compiled(text: str, names: Mapping[str, object]) -> Compute:
    """The formula as a function of the named numbers. BadFormula says what it may not hold.

    Known are + - * / ^ (power, binds tighter than a sign before it), parentheses, comparisons
    (1 or 0) and `FUNCTIONS`; `where(condition, a, b)` computes only what it chooses. The
    function raises CannotCompute where there is no finite value.
    """
    if len(text) > MAX_CHARACTERS:
        raise BadFormula(f"{len(text)} characters: a formula has at most {MAX_CHARACTERS}")
    if not _CHARACTERS.fullmatch(text):
        raise BadFormula("a formula has numbers, names, + - * / ^ ( ) , and comparisons")
    try:
        tree = ast.parse(" ".join(text.split()).replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadFormula(f"not a formula: {getattr(error, 'msg', error)}") from None
    if sum(1 for _ in ast.walk(tree)) > _MAX_NODES:
        raise BadFormula(f"more than {_MAX_NODES} operations and names")
    return _node(tree.body, names)


def _node(node: ast.expr, names: Mapping[str, object]) -> Compute:
    if isinstance(node, ast.Constant):
        return _constant(node)
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise BadFormula(f"{node.id} names none of the graders{near(node.id, names)}")
        return operator.itemgetter(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _guarded(node, _OPERATORS[type(node.op)], [node.left, node.right], names)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _guarded(node, operator.neg, [node.operand], names)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
        return _node(node.operand, names)
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops):
        return _comparison(node, names)
    if isinstance(node, ast.Call):
        return _call(node, names)
    raise BadFormula(f"{ast.unparse(node)[:80]} is not part of a formula")


def _constant(node: ast.Constant) -> Compute:
    if type(node.value) not in (int, float):
        raise BadFormula(f"{str(node.value)[:80]!r} is no number")
    try:
        value = float(node.value)  # type: ignore[arg-type]
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise BadFormula("a number that is too large")
    return lambda values: value


def _call(node: ast.Call, names: Mapping[str, object]) -> Compute:
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)[:80]
    if name not in FUNCTIONS:
        raise BadFormula(f"there is no function {name}{near(name, FUNCTIONS)}")
    if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise BadFormula(f"{name} takes plain arguments")
    if name == _CHOICE:
        return _choice(node, names)
    function, least, most = _FUNCTIONS[name]
    if not least <= len(node.args) <= most:
        raise BadFormula(f"{name} takes {least if least == most else f'{least} or more'} arguments")
    return _guarded(node, function, node.args, names)


def _choice(node: ast.Call, names: Mapping[str, object]) -> Compute:
    if len(node.args) != 3:
        raise BadFormula(f"{_CHOICE} takes 3 arguments: {_CHOICE}(condition, then, else)")
    condition, then, otherwise = (_node(argument, names) for argument in node.args)
    return lambda values: then(values) if condition(values) else otherwise(values)


def _comparison(node: ast.Compare, names: Mapping[str, object]) -> Compute:
    sides = [_node(side, names) for side in [node.left, *node.comparators]]
    tests = [_COMPARISONS[type(op)] for op in node.ops]

    def compare(values: Values) -> float:
        numbers = [side(values) for side in sides]
        pairs = zip(tests, numbers, numbers[1:], strict=False)
        return float(all(test(a, b) for test, a, b in pairs))

    return compare


def _guarded(
    node: ast.expr,
    function: Callable[..., Any],
    arguments: list[ast.expr],
    names: Mapping[str, object],
) -> Compute:
    computes = [_node(argument, names) for argument in arguments]
    text = ast.unparse(node).replace("**", "^")[:80]

    def compute(values: Values) -> float:
        numbers = [argument(values) for argument in computes]
        try:
            value = float(function(*numbers))
        except (ArithmeticError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            given = ", ".join(f"{number:g}" for number in numbers)
            raise CannotCompute(f"{text} has no finite value for {given}")
        return value

    return compute
