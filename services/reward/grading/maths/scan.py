"""Cutting a tidied text at what stands outside all brackets."""

from __future__ import annotations

import re
from collections.abc import Iterator

_OPENING = {
    "(": ")",
    "[": "]",
    "{": "}",
    "⦃": "⦄",
    "⟨": "⟩",
    "⟦": "⟧",
    "⌊": "⌋",
    "⌈": "⌉",
    "⟪": "⟫",
}
_CLOSING = frozenset(_OPENING.values())
_ENVIRONMENT = re.compile(r"\\(begin|end)\{[a-zA-Z*]+\}")
_CONJUNCTION = re.compile(
    r"⟦\s*(?:,\s*)?(and|or)(?:\s+[a-z])?\s*⟧|(?<![A-Za-z])(and|or)(?![A-Za-z])"
)


def outside(text: str) -> Iterator[tuple[int, str]]:
    """The characters outside all brackets and environments, with their positions.

    A half-open interval's `)` may close a `[`.
    """
    depth = 0
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            environment = _ENVIRONMENT.match(text, position)
            if environment:
                depth += 1 if environment[1] == "begin" else -1
                position = environment.end()
                continue
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth = max(0, depth - 1)
        elif depth == 0:
            yield position, character
        position += 1


def split(text: str, separators: str) -> list[tuple[str, str]]:
    """The pieces between separators outside brackets, each with the separator before it."""
    pieces = []
    begin, before = 0, ""
    for position, character in outside(text):
        if character in separators:
            pieces.append((before, text[begin:position].strip()))
            begin, before = position + 1, character
    return [*pieces, (before, text[begin:].strip())]


def listed(text: str) -> tuple[list[str], str]:
    """What stands between commas, semicolons, "and" and "or"; and which of and, or was said."""
    said = ""

    def comma(match: re.Match[str]) -> str:
        nonlocal said
        said = match[1] or match[2]
        return ","

    joined = _CONJUNCTION.sub(comma, text)
    pieces = [piece for _, piece in split(joined, ",;")]
    return [piece for piece in pieces if piece], said


def wrapped(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) of a text that one pair of brackets holds whole."""
    if len(text) < 2 or text[0] not in _OPENING or text[-1] not in _CLOSING:
        return None
    depth = 0
    for position, character in enumerate(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
            if depth == 0 and position < len(text) - 1:
                return None
    return (text[0], text[1:-1].strip(), text[-1]) if depth == 0 else None
