"""Answers remembered by the content of their requests; the least recently used go first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from services.reward.outside import metrics

_ENTRY_BYTES = 200  # of key and bookkeeping


class AnswerCache:
    """Bounded by what its answers take as JSON, in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._answers: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> tuple[Any] | None:
        """The answer, in a tuple, if it is remembered."""
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return (self._answers[key][0],)

    def put(self, key: str, answer: Any) -> None:
        """Remembers an answer, for as long as there is room."""
        self.forget([key])
        size = len(json.dumps(answer)) + _ENTRY_BYTES
        self._answers[key] = (answer, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._answers.popitem(last=False)[1][1]
        metrics.CACHE_BYTES.set(self._bytes)

    def forget(self, keys: Iterable[str]) -> None:
        """Drops answers that turned out to be of no use."""
        for key in keys:
            _, size = self._answers.pop(key, (None, 0))
            self._bytes -= size
