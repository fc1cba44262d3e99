"""A scoring request, and what one may ask."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.reward.waiting import WireItem


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What one request may ask and how much may wait."""

    item_timeout_s: float = 10.0  # where the grader names none
    max_item_timeout_s: float = 300.0
    max_items: int = 4096
    max_request_bytes: int = 64 << 20
    max_item_bytes: int = 4 << 20
    max_queued_items: int = 16_384
    max_queued_bytes: int = 256 << 20
    max_request_s: float = 3600.0
    max_remembered: int = 200_000  # results kept for repeated request ids
    max_cached: int = 200_000  # rewards kept by content; 0: none
    max_cached_bytes: int = 128 << 20

    @property
    def max_wire_bytes(self) -> int:
        """Of a request on its way: beyond its items' texts, what frames and escapes them."""
        return self.max_request_bytes * 5 // 4 + (1 << 20)


@dataclass(frozen=True, slots=True)
class Request:
    """A scoring request of either door."""

    request_id: str
    job_id: str
    grader_json: str
    items: Sequence[WireItem]


def digest_of(request: Request) -> bytes:
    """The same for two requests that ask for the same."""
    items = [
        (i.prompt_json, i.completion, i.item_json, i.group, i.num_tokens) for i in request.items
    ]
    text = json.dumps([request.job_id, request.grader_json, items])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
