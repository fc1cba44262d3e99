"""The time that is left for the item that a worker scores."""

from __future__ import annotations

import math
import time

_deadline = math.inf


def start(limit_s: float) -> None:
    """An item's clock runs from now."""
    global _deadline
    _deadline = time.monotonic() + limit_s


def left_s() -> float:
    """Seconds until the item is given up; infinite where nobody has said."""
    return _deadline - time.monotonic()
