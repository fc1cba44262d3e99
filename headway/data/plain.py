"""Nested values as plain JSON values, whichever writer or generator made them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

_INT64 = range(-(2**63), 2**64)  # what msgpack can carry


def plain(value: Any) -> Any:
    """Dicts with string keys, lists, strings, numbers, booleans and None.

    Tuples, sets and arrays become lists, dates ISO strings, integers beyond 64 bits
    and anything else their text.
    """
    if value is None or isinstance(value, bool | str | float):
        return value if type(value) in (bool, str, float, type(None)) else _base(value)
    if isinstance(value, int):
        return int(value) if int(value) in _INT64 else str(int(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    return _other(value)


def _base(value: Any) -> Any:
    """A subclass of str or float (an enum, a numpy scalar) as its base."""
    return str.__str__(value) if isinstance(value, str) else float(value)


def _other(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(value.tolist())
    return str(value)
