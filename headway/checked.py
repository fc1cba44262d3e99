"""Values that came over the wire, made sure of before they are believed.

Each returns its value with the type it promises, or raises InvalidSpec with the field's name.
"""

from __future__ import annotations

import math
from typing import Any

from headway.errors import InvalidSpec

MAX_WHOLE = 2**53
"""Above it the ledger's scripts, which count in doubles, would no longer count by ones."""

MAX_TEXT = 64 << 20
MAX_ITEMS = 1 << 16
"""Of one list or mapping."""

_MAX_DEPTH = 64
_PLAIN = (str, int, float, bool, type(None))


def whole(value: Any, name: str, least: int = 0, most: int = MAX_WHOLE) -> int:
    """An integer in a range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidSpec(f"{name} {_shown(value)} is no whole number in {least} to {most}")
    return value


def number(value: Any, name: str, least: float = -math.inf) -> float:
    """A finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidSpec(f"{name} {_shown(value)} is no number")
    try:
        real = float(value)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real) or real < least:
        raise InvalidSpec(f"{name} {_shown(value)} is no finite number of at least {least:g}")
    return real


def seconds(value: Any, name: str, most: float = 86_400.0) -> float:
    """A span of time above 0."""
    span = number(value, name)
    if not 0 < span <= most:
        raise InvalidSpec(f"{name} {span:g} is not above 0 and at most {most:g} s")
    return span


def text(value: Any, name: str, most: int = MAX_TEXT) -> str:
    """A text of at most so many characters."""
    if not isinstance(value, str) or len(value) > most:
        raise InvalidSpec(f"{name} {_shown(value)} is no text of at most {most} characters")
    return value


def label(value: Any, name: str, most: int = 200) -> str:
    """A name: a text of 1 to so many characters that can be shown on one line."""
    if not text(value, name, most) or not value.isprintable():
        raise InvalidSpec(f"{name} {_shown(value)} is not 1 to {most} printable characters")
    return str(value)


def row(value: Any, name: str, length: int) -> list[Any]:
    """A list of an exact length."""
    if not isinstance(value, list) or len(value) != length:
        raise InvalidSpec(f"{name} is no list of {length}")
    return value


def items(value: Any, name: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise InvalidSpec(f"{name} is no list")
    return value


def mapping(value: Any, name: str) -> dict[str, Any]:
    """A mapping with texts as keys."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidSpec(f"{name} is no mapping of texts")
    return value


def plain(value: Any, name: str, depth: int = 0) -> Any:
    """Lists, mappings (at most 65536 long), texts, numbers, booleans and None, at most 64 deep."""
    if depth > _MAX_DEPTH:
        raise InvalidSpec(f"{name} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict | list) and len(value) > MAX_ITEMS:
        raise InvalidSpec(f"{name} holds a list or mapping of {len(value)}, above {MAX_ITEMS}")
    if isinstance(value, dict):
        for item in mapping(value, name).values():
            plain(item, name, depth + 1)
    elif isinstance(value, list):
        for item in value:
            plain(item, name, depth + 1)
    elif not isinstance(value, _PLAIN):
        raise InvalidSpec(f"{name} holds a {type(value).__name__}, which is no JSON value")
    return value


def _shown(value: Any) -> str:
    return ascii(value)[:80] if isinstance(value, str | int | float) else type(value).__name__
