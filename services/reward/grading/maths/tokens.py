"""The tokens of an expression: numbers, commands and single characters.

A decimal that repeats is one token, `\\value` and a letter, that stands for a fraction.
"""

from __future__ import annotations

import re
from fractions import Fraction

from services.reward.grading.maths.sizes import Unreadable
from services.reward.grading.numbers import repeated_block, repeating_decimal

_MAX_TOKENS = 1500

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<command>\\[A-Za-z]+)|(?P<other>[^\s]))", re.ASCII
)
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\s*(?:\\overline|\\bar|\\dot)\s*\{?\s*(\d+)\s*\}?|\((\d+)\))", re.ASCII
)
_GOES_ON = re.compile(r"(\d*)\.(\d+)\s*…")


class Tokens:
    """Those of one text, consumed from the left. Unreadable: none, too many, or not the wanted."""

    def __init__(self, text: str) -> None:
        self.at = 0  # the place of the next token
        self._values: list[Fraction] = []
        self._all = _split(_GOES_ON.sub(self._going_on, _REPEATING.sub(self._over, text)))

    @property
    def all_taken(self) -> bool:
        """Whether there is no next token."""
        return self.at == len(self._all)

    def peek(self, ahead: int = 0) -> str:
        """The token so many places on; empty beyond the last one."""
        at = self.at + ahead
        return self._all[at] if at < len(self._all) else ""

    def take(self, wanted: str = "") -> str:
        """The next token, which must be the wanted one where one is."""
        token = self.peek()
        if not token or (wanted and token != wanted):
            raise Unreadable(f"{wanted or 'something'} expected, not {token!r}")
        self.at += 1
        return token

    def since(self, begin: int) -> list[str]:
        """The tokens taken since `at` was `begin`."""
        return self._all[begin : self.at]

    def ahead(self, begin: int, end: int) -> list[str]:
        """The tokens from `begin` places on up to `end`, or fewer."""
        return self._all[self.at + begin : self.at + end]

    def skip(self, count: int) -> None:
        """Takes so many tokens, which were seen before."""
        self.at += count

    def part(self) -> None:
        """Makes the next token, of several characters, two: its first one and the others."""
        token = self._all[self.at]
        self._all[self.at : self.at + 1] = [token[0], token[1:]]

    def value(self, name: str) -> Fraction:
        """What a `value` command stands for."""
        return self._values[ord(name[5:]) - 65]

    def _over(self, match: re.Match[str]) -> str:
        return self._kept(repeating_decimal(match[1], match[2], match[3] or match[4]))

    def _going_on(self, match: re.Match[str]) -> str:
        found = repeated_block(match[2])
        if found is None:
            raise Unreadable("decimals that go on")
        return self._kept(repeating_decimal(match[1], *found))

    def _kept(self, value: Fraction) -> str:
        self._values.append(value)
        return f"\\value{chr(64 + len(self._values))} "


def _split(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    while position < len(text) and text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None or len(tokens) >= _MAX_TOKENS:
            raise Unreadable("no expression, or one too long")
        tokens.append(match.group().strip())
        position = match.end()
    if not tokens:
        raise Unreadable("nothing")
    return tokens
