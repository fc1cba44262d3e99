"""The nearest known name, for error messages."""

import difflib
from collections.abc import Iterable


def near(name: str, known: Iterable[str], prefix: str = "") -> str:
    """` (did you mean …?)`, or nothing where nothing is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{found[0]}?)" if found else ""
