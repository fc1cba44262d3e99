"""What is known already: rewards of items that a deterministic grader has scored before.

The key is the content: the grader with all its defaults, the completion, the item and, where
the grader looks at it, the prompt. Errors are never kept: the next time may go better.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.graders import GraderSpec
from headway.messages import Score
from services.reward import metrics
from services.reward.waiting import WireItem

if TYPE_CHECKING:
    from hashlib import blake2b

_ENTRY_BYTES = 400  # of a key, a score and their places, roughly as CPython has them
_PART_BYTES = 80


class ScoreCache:
    """The rewards used last, bounded in number and in bytes."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        """Either bound 0: nothing is kept."""
        self._max_items, self._max_bytes = max_items, max_bytes
        self._scores: OrderedDict[bytes, Score] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._scores)

    def of(self, grader: GraderSpec) -> GraderCache | None:
        """The part of it that a grader may use; None for one that may judge otherwise next time."""
        kept = self._max_items > 0 and self._max_bytes > 0
        if not kept or not grader.deterministic() or grader.whole_group():
            return None
        return GraderCache(self, grader)

    def get(self, key: bytes) -> Score | None:
        """What is kept under a key."""
        score = self._scores.get(key)
        if score is not None:
            self._scores.move_to_end(key)
        return score

    def put(self, key: bytes, score: Score) -> None:
        """Keeps a score, and drops those not used for longest until it fits."""
        if key in self._scores:
            return
        self._scores[key] = score
        self._num_bytes += _size(score)
        while len(self._scores) > self._max_items or self._num_bytes > self._max_bytes:
            _, dropped = self._scores.popitem(last=False)
            self._num_bytes -= _size(dropped)
        metrics.CACHED_ITEMS.set(len(self._scores))


class GraderCache:
    """The cached rewards of one grader."""

    def __init__(self, cache: ScoreCache, grader: GraderSpec) -> None:
        self._cache = cache
        text = grader.canonical_json()
        self._needs_prompt = "prompt" in text
        self._start = _digest(None, text)
        self._kind = grader.type

    def key(self, item: WireItem) -> bytes:
        """The content of an item as this grader sees it, in 16 bytes."""
        prompt = item.prompt_json if self._needs_prompt else ""
        texts = (item.completion, item.item_json, prompt, str(item.num_tokens))
        return _digest(self._start, *texts).digest()

    def get(self, key: bytes) -> Score | None:
        """The known score, which took no time."""
        score = self._cache.get(key)
        metrics.CACHE.labels(self._kind, "miss" if score is None else "hit").inc()
        return score

    def put(self, key: bytes, score: Score) -> None:
        """Keeps a reward; an error is not kept."""
        if score.reward is not None:
            self._cache.put(key, replace(score, duration_s=0.0))


def _digest(start: blake2b | None, *texts: str) -> blake2b:
    digest = hashlib.blake2b(digest_size=16) if start is None else start.copy()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest


def _size(score: Score) -> int:
    return _ENTRY_BYTES + sum(_PART_BYTES + len(name) for name in score.parts)
