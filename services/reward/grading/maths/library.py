"""math-verify for what our own reader does not know: integrals, limits, sums, determinants.

It takes both answers, or neither: each is screened first, for it computes whatever it is
given, drops what it does not understand, and may take for ever.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

# It warns that its own time limits are off: ours is around it.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_MAX_LENGTH = 300
_CONFIG = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
        )
    ),
)
# What it computes without end, drops in silence, or reads as something else.
_REFUSED = re.compile(
    r"\d{12}|!|\\binom|\\[lc]?dots|\.\.\.|…|\\text|[⟦⟪±]|\\pm|\\mp|\d\s+\d|\d\s*\(\s*\d|\}\s*\(\s*\d"
    r"|\^\s*(?:\{[^{}]*)?\^|\^\s*\{?\s*-?\s*\d{4}|_\s*\{?\s*\d{5}|[A-Za-z]{5,}(?<!\\infty)\s+[A-Za-z]{3,}"
)
_KNOWN = re.compile(
    r"\\(?:int|lim|sum|prod|det|gcd|operatorname|frac\{d\}|partial|begin|overline|mod|bmod)"
)


_LATEX = {
    "⏎": r"\\ ", "∞": r"\infty ", "π": r"\pi ", "*": r"\cdot ", "≤": r"\leq ", "≥": r"\geq ",
    "≠": r"\neq ", "⦃": r"\{", "⦄": r"\}", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "→": r"\to ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "°": r"^{\circ}",
    "∖": r"\setminus ", "∅": r"\emptyset ", "%": r"\%",
}  # fmt: skip

_MADE_LATEX = str.maketrans(_LATEX)


@lru_cache(maxsize=1024)
def understood(latex: str) -> Any:
    """What math-verify reads in a tidied text; None where it should not be asked."""
    if len(latex) > _MAX_LENGTH or _REFUSED.search(latex):
        return None
    latex = latex.translate(_MADE_LATEX)
    found = parse(f"${latex}$", _CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def worth_asking(latex: str) -> bool:
    """Whether a text has what only math-verify knows."""
    return _KNOWN.search(latex) is not None


def agrees(gold: str, answer: str) -> bool:
    """Whether math-verify takes the two for the same; False where it reads either not at all."""
    right, given = understood(gold), understood(answer)
    if right is None or given is None:
        return False
    return bool(verify(right, given, float_rounding=12, numeric_precision=40, timeout_seconds=None))
