"""Values as plain data: what crosses the border between a program and whoever judges it.

JSON with tags. Nothing of the sender's code runs at the receiver: what arrives is made of
builtin types alone, so no `__eq__`, `__hash__` or `__bool__` of a program takes part in a verdict.
"""

from __future__ import annotations

import builtins
from _json import encode_basestring_ascii as _quoted  # json itself is slow to import
from _json import make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:  # so is typing
    from collections.abc import Callable
    from typing import Any

_MAX_DEPTH = 100
_BIG = 1 << 63
_TAGS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_MAKE: dict[str, type] = {tag: kind for kind, tag in _TAGS.items()}


class NotPlain(TypeError):
    """A value that is no plain data."""


def encode(value: Any, other: Callable[[Any], Any] | None = None, depth: int = 0) -> Any:
    """A value as JSON-able data. `other` encodes what is no plain data; without it NotPlain."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -_BIG < number < _BIG else ["i", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if depth > _MAX_DEPTH:
        raise NotPlain("nested too deeply")
    for kind, tag in _TAGS.items():
        if isinstance(value, kind):
            parts = kind.__iter__(value)  # type: ignore[attr-defined]
            return [tag, [encode(part, other, depth + 1) for part in parts]]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return ["d", [[encode(part, other, depth + 1) for part in pair] for pair in pairs]]
    return _rare(value, other, depth)


def _rare(value: Any, other: Callable[[Any], Any] | None, depth: int) -> Any:
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", [value.real, value.imag]]
    module = type(value).__module__
    if module == "decimal" and type(value).__name__ == "Decimal":
        return ["D", str(value)]
    if module == "fractions" and type(value).__name__ == "Fraction":
        return ["F", [encode(value.numerator), encode(value.denominator)]]
    if module == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), other, depth + 1)
    if isinstance(value, type):
        name = type.__dict__["__name__"].__get__(value)
        if getattr(builtins, name, None) is value:
            return ["T", name]
    if other is None:
        raise NotPlain(f"{type(value).__name__} is no plain data")
    return other(value)


def decode(data: Any, other: Callable[[str, Any], Any] | None = None) -> Any:
    """The value of `encode`'s data. ValueError, TypeError or KeyError for anything else."""
    if not isinstance(data, list):
        return data
    tag, body = data
    if tag in _MAKE:
        return _MAKE[tag](decode(part, other) for part in body)
    if tag == "d":
        return {decode(key, other): decode(part, other) for key, part in body}
    if tag == "i":
        return int(body, 16)
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "c":
        return complex(*body)
    if tag == "D":
        from decimal import Decimal

        return Decimal(body)
    if tag == "F":
        from fractions import Fraction

        return Fraction(decode(body[0]), decode(body[1]))
    if tag == "T" and isinstance(getattr(builtins, body, None), type):
        return getattr(builtins, body)
    if other is None:
        raise ValueError(f"unknown tag {tag!r}")
    return other(tag, body)


def dumps(data: Any) -> str:
    """`encode`'s data, and dicts with texts as keys, as JSON."""
    if data is None or isinstance(data, bool):
        return {None: "null", True: "true", False: "false"}[data]
    if isinstance(data, str):
        return str(_quoted(data))
    if isinstance(data, float):
        text = float.__repr__(data)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    if isinstance(data, int):
        return int.__repr__(data)
    if isinstance(data, list):
        return f"[{','.join(map(dumps, data))}]"
    return f"{{{','.join(f'{dumps(key)}:{dumps(part)}' for key, part in data.items())}}}"


class _Reading:
    """What `_json` asks its caller for, as `json` gives it."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_int, parse_float = int, float
    parse_constant = float  # NaN, Infinity, -Infinity


_scan = make_scanner(_Reading())  # type: ignore[arg-type]


def loads(text: str) -> Any:
    """The value of JSON. ValueError or StopIteration for anything else."""
    return _scan(text, 0)[0]
