"""One expression of a tidied text as a sympy value, read so that it cannot run away.

Our own reader, since math-verify's takes `2(3)` for 5, `1 2` for 3, `0.35` for a binary
float and `\\binom{1000000}{500000}` for something to compute at once. It knows the notation
of answers: numbers, letters with indices, + - * / ^, fractions, roots, functions,
factorials, absolute values. What it does not know is `Unreadable`, never a guess; a
number of more digits than `MAX_DIGITS` is `TooLarge` before anything is computed.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import sympy

from services.reward.grading.maths.sizes import Sizes, Unreadable
from services.reward.grading.maths.tokens import Tokens
from services.reward.grading.maths.vocabulary import ACCENTS, FUNCTIONS, GREEK, INVERSES

_MAX_DEPTH = 60

# Words run together are no product of their letters.
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{4,}|[A-Za-z]{2,} +[A-Za-z](?![A-Za-z]*[({_])"
    r"|[A-Za-z] +[A-Za-z]{2,})"
)
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "⌊": "⌋", "⌈": "⌉"}


def read_expression(text: str) -> sympy.Expr:
    """The value. Unreadable or TooLarge when there is none to be had."""
    if _PROSE.search(text):
        raise Unreadable("prose")
    try:
        return _Reader(text).whole()
    except (RecursionError, ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise Unreadable(str(error)[:200]) from None


class _Reader:
    """Recursive descent; every power and factorial is sized before it is computed."""

    def __init__(self, text: str) -> None:
        self._tokens = Tokens(text)
        self._peek, self._take = self._tokens.peek, self._tokens.take
        self._sizes = Sizes()
        self._depth = 0

    def whole(self) -> sympy.Expr:
        value = self._sum()
        if not self._tokens.all_taken:
            raise Unreadable(f"unexpected {self._peek()!r}")
        return value

    def _sum(self) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable("nested too deeply")
        terms = [self._signed()]
        while self._peek() in ("+", "-"):
            negative = self._take() == "-"
            term = self._term()
            terms.append(-term if negative else term)
        self._depth -= 1
        return sympy.Add(*terms)

    def _signed(self) -> Any:
        negative = False
        while self._peek() in ("+", "-"):
            negative ^= self._take() == "-"
        value = self._term()
        return -value if negative else value

    def _term(self) -> Any:
        value = self._implicit()
        while self._peek() in ("*", "/"):
            divides = self._take() == "/"
            sign = 1
            while self._peek() in ("+", "-"):
                sign = -sign if self._take() == "-" else sign
            begin = self._tokens.at
            factor = self._power() if divides else self._implicit()
            if divides:
                if self._starts_factor():  # a/2b: nobody knows
                    if not all(t[0].isdigit() for t in self._tokens.since(begin)):
                        raise Unreadable("a division and then a product without a sign")
                    factor = 1 / (self._sizes.divided(1, factor) * self._implicit())
                value = self._sizes.divided(value, sign * factor)
            else:
                value = value * factor * sign
        return value

    def _implicit(self) -> Any:
        value = self._power()
        while self._starts_factor():
            number = self._peek()[0].isdigit() or self._peek()[0] == "."
            if number and self._peek(-1)[-1:] not in (")", "]"):
                raise Unreadable("a number after a factor, without a sign")
            value = value * self._power()
        return value

    def _starts_factor(self) -> bool:
        token = self._peek()
        if not token:
            return False
        return token[0].isalnum() or token[0] in ".\\({[π⌊⌈"

    def _power(self) -> Any:
        base = self._postfix()
        if self._peek() != "^":
            return base
        self._take()
        return self._sizes.raised(base, self._exponent())

    def _exponent(self) -> Any:
        sign = 1
        while self._peek() in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        value = self._postfix()
        if self._peek() == "^":
            self._take()
            value = self._sizes.raised(value, self._exponent())
        return sign * value

    def _postfix(self) -> Any:
        value = self._atom()
        while self._peek() == "!":
            self._take()
            value = self._sizes.factorial(value)
        return value

    def _atom(self) -> Any:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return self._number(token)
        if token == "π":
            return sympy.pi
        if token == "∞":
            return sympy.oo
        if token in _CLOSING:
            return self._group(token)
        if token[0] == "\\":
            return self._command(token)
        if token.isalpha() and len(token) == 1:
            if token in "ei" and self._peek() not in ("_", "'"):
                return sympy.E if token == "e" else sympy.I
            return self._symbol(token)
        raise Unreadable(f"unexpected {token!r}")

    def _group(self, opening: str) -> Any:
        value = self._sum()
        self._take(_CLOSING[opening])
        if opening == "|":
            return sympy.Abs(value)
        if opening == "⌊":
            return sympy.floor(value)
        return sympy.ceiling(value) if opening == "⌈" else value

    def _number(self, token: str) -> Any:
        self._sizes.spend(len(token))
        if "." in token:
            return sympy.Rational(Fraction(token if token[-1] != "." else token[:-1]))
        whole = sympy.Integer(int(token))
        mixed = self._mixed()
        return whole if mixed is None else whole + mixed

    def _mixed(self) -> Any:
        """The fraction of a mixed number, where digits over digits follow a whole number."""
        if self._peek() == "\\frac":
            parts = self._tokens.ahead(1, 7)
            if len(parts) == 6 and parts[0::3] == ["{", "{"] and parts[2::3] == ["}", "}"]:
                above, below = parts[1], parts[4]
                taken = 7
            elif parts and len(parts[0]) == 2 and parts[0].isdigit():
                above, below, taken = parts[0][0], parts[0][1], 2
            else:
                return None
        elif self._peek().isdigit() and self._peek(1) == "/" and self._peek(2).isdigit():
            above, below, taken = self._peek(), self._peek(2), 3
        else:
            return None
        if not (above.isdigit() and below.isdigit() and 0 < int(above) < int(below)):
            return None
        self._tokens.skip(taken)
        return sympy.Rational(int(above), int(below))

    def _symbol(self, name: str) -> Any:
        while self._peek() in ("'", "_"):
            if self._take() == "'":
                name += "'"
            else:
                name += "_" + self._raw_argument()
        return sympy.Symbol(name)

    def _raw_argument(self) -> str:
        token = self._take()
        if token != "{":
            return token
        parts = []
        while self._peek() != "}":
            parts.append(self._take())
        self._take("}")
        return "".join(parts)

    def _argument(self) -> Any:
        """What a command takes: a group, one digit, one letter or one command."""
        token = self._peek()
        if token == "{":
            self._take()
            value = self._sum()
            self._take("}")
            return value
        if len(token) > 1 and token[0].isdigit():
            self._tokens.part()
        return self._atom()

    def _command(self, token: str) -> Any:
        name = token[1:]
        if name.startswith("value"):
            return sympy.Rational(self._tokens.value(name))
        if name == "frac":
            above, below = self._two_arguments()
            return self._sizes.divided(above, below)
        if name == "binom":
            return self._sizes.binomial(*self._two_arguments())
        if name == "sqrt":
            return self._root()
        if name in FUNCTIONS:
            return self._function(name)
        if token in ACCENTS:
            return self._symbol(self._raw_argument())
        if name in GREEK:
            return self._symbol(name)
        raise Unreadable(f"unknown {token}")

    def _two_arguments(self) -> tuple[Any, Any]:
        above = self._argument()
        short = self._peek() != "{"
        below = self._argument()
        if short and self._peek()[:1].isdigit():  # \frac123: nobody knows
            raise Unreadable("digits after a fraction without braces")
        return above, below

    def _root(self) -> Any:
        degree: Any = sympy.Integer(2)
        if self._peek() == "[":
            self._take()
            degree = self._sum()
            self._take("]")
        if self._peek() == "(":
            value = self._atom()
        else:
            short = self._peek() != "{"
            value = self._argument()
            if short and self._peek()[:1].isdigit():
                raise Unreadable("digits after a root without braces")
        if value.is_Rational and value < 0 and degree.is_Integer and degree % 2 == 1:
            return -self._sizes.raised(-value, 1 / degree)
        return self._sizes.raised(value, self._sizes.divided(1, degree))

    def _function(self, name: str) -> Any:
        base = power = None
        if self._peek() == "_":
            self._take()
            base = self._argument()
            if name != "log":
                raise Unreadable("an index at a function")
        if self._peek() == "^":
            self._take()
            power = self._exponent()
        if power == -1:
            if name not in INVERSES:
                raise Unreadable("the inverse of a function")
            name, power = INVERSES[name], None
        value = self._applied()
        if base is not None:
            result = self._sizes.divided(sympy.log(value), sympy.log(base))
        elif name == "exp":
            result = self._sizes.raised(sympy.E, value)
        else:
            result = FUNCTIONS[name](value)
        return result if power is None else self._sizes.raised(result, power)

    def _applied(self) -> Any:
        """A function's argument: a group alone, else the product up to the next sign."""
        if self._peek() in ("(", "[", "{", "|"):
            value = self._power() if self._peek() != "{" else self._argument()
            return value
        sign = -1 if self._peek() == "-" and self._take() else 1
        value = self._power()
        while self._starts_factor() and self._peek()[1:] not in FUNCTIONS:
            if self._peek()[0].isdigit() or self._peek() in ("(", "["):
                raise Unreadable("where the argument of a function ends")
            value = value * self._power()
        if self._peek() == "/":
            raise Unreadable("where the argument of a function ends")
        return sign * value
