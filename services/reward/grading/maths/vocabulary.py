"""The commands that an expression may have: letters, accents, functions and their inverses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

_GREEK_NAMES = """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon
    phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar
"""
GREEK = frozenset(_GREEK_NAMES.split())
ACCENTS = frozenset({"\\bar", "\\overline", "\\hat", "\\vec", "\\tilde", "\\dot"})
# A logarithm without a base is taken to some base that nobody knows: ln or lg, it depends.
_SOME_BASE = sympy.Symbol("log_base", positive=True)
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec,
    "csc": sympy.csc, "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan,
    "asin": sympy.asin, "acos": sympy.acos, "atan": sympy.atan, "sinh": sympy.sinh,
    "cosh": sympy.cosh, "tanh": sympy.tanh, "ln": sympy.log, "exp": sympy.exp, "abs": sympy.Abs,
    "lg": lambda value: sympy.log(value) / sympy.log(10),
    "log": lambda value: sympy.log(value) * _SOME_BASE,
}  # fmt: skip
INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
