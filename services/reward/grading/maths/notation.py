"""The many spellings of one answer made one: LaTeX, plain and Unicode notation.

`tidy` gives a text in which an operator is one character (`≤`, `∪`, `±`, `…`), a set's
braces are `⦃ ⦄`, words stand in `⟦ ⟧` and everything that only lays out is gone.
"""

from __future__ import annotations

import re
from functools import lru_cache

from services.reward.grading.characters import plain_characters

_WORDY = "text|textbf|textit|textrm|textnormal|textsf|texttt|mbox|hbox|mathrm|operatorname|emph"
_WORDS = re.compile(rf"\\(?:{_WORDY})\*?\s*\{{([^{{}}]*)\}}")
_STYLED = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathcal|mathfrak|mathscr|underline|ensuremath|math"
    r"|displaystyle|vec|overrightarrow|hat|widehat|bar|dot|tilde|pmb)\s*(?:\{([^{}]*)\}|([A-Za-z]))"
)
_MATH_INSIDE = re.compile(r"\s*(?:[-+*/=^_().,\d\s]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))+\s*")
_LAYOUT = [
    (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\ |\\;|\\:)(?=\d{3}(?!\d))", ","),
    (r"\\\$", "＄"),
    (r"\\(?:left|right)\s*\.", " "),
    (r"\\(?:m?left|m?right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits"
     r"|rm|bf|it|centering|Large|large|huge|hfill|noindent)(?![A-Za-z])", " "),
    (r"\\(?:[hv]space|vphantom|phantom|hphantom|label|tag)\*?\{[^{}]*\}", " "),
    (r"\\[,;:!>/ ]|~|\\(?:q?quad|enspace|thinspace|newline)(?![A-Za-z])", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\[()\[\]]", " "),
    (r"\\%|\bper ?cent(?:age)?\b|\bpct\b", "%"),
    (r"\^\s*(?:\{\s*)?\\circ(?![A-Za-z])\s*\}?|\\(?:degree|textdegree)(?![A-Za-z])(?:\{\})?", "°"),
    (r"\\(?:l?dots[bcm]?|cdots|ldots|dotsb|vdots|ddots)(?![A-Za-z])|\.\.\.+", "…"),
    (r"\\\{|\\lbrace(?![A-Za-z])", "⦃"),
    (r"\\\}|\\rbrace(?![A-Za-z])", "⦄"),
    (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])|\\\|", "|"),
    (r"\\(?:lVert|rVert|Vert)(?![A-Za-z])", "‖"),
    (r"\\(?:langle|left<)(?![A-Za-z])", "⟨"),
    (r"\\(?:rangle)(?![A-Za-z])", "⟩"),
    (r"\\(?:lbrack)(?![A-Za-z])", "["),
    (r"\\(?:rbrack)(?![A-Za-z])", "]"),
    (r"\\(?:lparen)(?![A-Za-z])", "("),
    (r"\\(?:rparen)(?![A-Za-z])", ")"),
    (r"\\lfloor(?![A-Za-z])", "⌊"),
    (r"\\rfloor(?![A-Za-z])", "⌋"),
    (r"\\lceil(?![A-Za-z])", "⌈"),
    (r"\\rceil(?![A-Za-z])", "⌉"),
    (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,4})(?![\w.]*\w)", r"(\1*10^{\2})"),
    (r"\*\*", "^"),
    (r"\\(?:times|cdot|ast|bullet)(?![A-Za-z])", "*"),
    (r"\\div(?![A-Za-z])", "/"),
    (r"\\(?:leqslant|leqq|leq|le)(?![A-Za-z])|<=|=<", "≤"),
    (r"\\(?:geqslant|geqq|geq|ge)(?![A-Za-z])|>=", "≥"),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\(?:neq|ne)(?![A-Za-z])|\\not\s*=|!=|<>", "≠"),
    (r"\\(?:approx|approxeq|simeq|doteq|cong)(?![A-Za-z])|~=", "≈"),
    (r"\\(?:equiv)(?![A-Za-z])", "≡"),
    (r"\\(?:infty|infinity)(?![A-Za-z])|\b(?:infinity|infty|inf|oo)\b", "∞"),
    (r"\\(?:pi)(?![A-Za-z])|\bpi\b", "π"),
    (r"\\(?:cup|bigcup)(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])", "∪"),
    (r"\\(?:cap|bigcap)(?![A-Za-z])", "∩"),
    (r"\\(?:setminus|smallsetminus|backslash)(?![A-Za-z])", "∖"),
    (r"\\(?:in)(?![A-Za-z])", "∈"),
    (r"\\(?:emptyset|varnothing)(?![A-Za-z])|⦃\s*⦄", "∅"),
    (r"\\(?:pm)(?![A-Za-z])|\+/-|\+-", "±"),
    (r"\\(?:mp)(?![A-Za-z])", "∓"),
    (r"\\(?:land|wedge)(?![A-Za-z])", "⟦and⟧"),
    (r"\\(?:implies|to|Rightarrow|rightarrow|Longrightarrow|iff|Leftrightarrow)(?![A-Za-z])|=>|->",
     "→"),
    (r"\\(?:prime)(?![A-Za-z])", "'"),
    (r"\\mathbb\s*\{?\s*([A-Z])\s*\}?", "⟪\\1⟫"),
    (r"\\imath(?![A-Za-z])", "i"),
    (r"\\var(?=epsilon|phi|theta|rho|sigma|kappa)", r"\\"),
]  # fmt: skip
_LAYOUT_RULES = [(re.compile(pattern), replacement) for pattern, replacement in _LAYOUT]
_FUNCTIONS = (
    "arcsin|arccos|arctan|asin|acos|atan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|lg|exp"
    "|sqrt|gcd|lcm|min|max|binom|abs"
)
_PLAIN_FUNCTION = re.compile(rf"(?<![A-Za-z\\])(?:{_FUNCTIONS})(?![A-Za-z])")
_FUNCTION_NAME = re.compile(_FUNCTIONS)
_DECORATION = re.compile(r"^(?:\*\*|__|`+)+|(?:\*\*|__|`+)+$")
_EDGES = re.compile(r"^[\s:=≈,;→]+|(?<!!)[\s.,;:]+$|[\s.,;:]+$|\\+\s*$")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")
_ROW_END = re.compile(r"\\\\(?:\s*\[[^\[\]]*\])?|\\cr(?![A-Za-z])")
_BLANKS = re.compile(r"\s+")
# Not π, which has a meaning of its own here, nor Ω and ω, which may be ohms.
_GREEK_NAMES = """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon
    phi chi psi Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi
"""
_GREEK = str.maketrans(
    {
        letter: f"\\{name} "
        for letter, name in zip("αβγδεζηθικλμνξρστυφχψΓΔΘΛΞΠΣΦΨ", _GREEK_NAMES.split(), strict=True)
    }
    | {"ϵ": "\\epsilon ", "ϕ": "\\phi ", "ϑ": "\\theta "}
)
_KEY_BLANKS = re.compile(r"(?<!\d)[\s⟦⟧]+|[\s⟦⟧]+(?!\d)")
_KEY_BRACES = re.compile(r"\{([A-Za-z0-9])\}(?!\d)")
_PLAIN = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?", re.ASCII)


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    """The text in one spelling; see above. Linear, but for long texts do not ask."""
    if _PLAIN.fullmatch(text):
        return text
    text = plain_characters(text).translate(_GREEK)
    if "\\\\" in text:
        text = _ROW_END.sub("⏎", text) if "\\begin" in text else _DOUBLED.sub(r"\\", text)
    previous = ""
    text = text.strip()
    while text != previous:
        previous = text
        text = _DECORATION.sub("", text).strip()
    text = _currency(text)
    for pattern, replacement in _LAYOUT_RULES:
        text = pattern.sub(replacement, text)
    for _ in range(6):
        text, words = _WORDS.subn(_worded, text)
        text, styled = _STYLED.subn(lambda m: f"{{{m[1] or m[2] or ''}}}", text)
        if not words + styled:
            break
    text = _PLAIN_FUNCTION.sub(lambda m: "\\" + m[0], text) if "⟦" not in text else text
    text = text.replace("+∞", "∞") if text.startswith("+∞") else text
    text = _BLANKS.sub(" ", text)
    previous = ""
    while text != previous:
        previous = text
        text = _EDGES.sub("", text)
    return text


def key(tidied: str) -> str:
    """A tidied text for comparison letter by letter: no blanks, a word's case ignored."""
    whole = re.fullmatch(r"⟦([^⟦⟧]*)⟧|([A-Za-z][A-Za-z '-]+)", tidied)
    text = tidied.casefold() if whole else tidied
    return _KEY_BRACES.sub(r"\1", _KEY_BLANKS.sub("", text))


def _currency(text: str) -> str:
    """A dollar sign that stands for money becomes `＄`; those that begin and end maths go."""
    unescaped = text.count("$") - text.count("\\$")
    if unescaped == 1 and re.match(r"\s*-?\$\s*-?[\d.]", text):
        return text.replace("$", "＄", 1)
    return re.sub(r"(?<!\\)\$", " ", text)


def _worded(match: re.Match[str]) -> str:
    content = match[1].strip()
    if content == "＄":
        return content
    if _FUNCTION_NAME.fullmatch(content):
        return "\\" + content + " "
    if not content or _MATH_INSIDE.fullmatch(content):
        return f" {content} "
    return f" ⟦{content}⟧ "
