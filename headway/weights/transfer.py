"""One version over a weight group: packed buckets, two at a time.

Both sides cut the manifest by `bucket_layout`, so nothing but bytes travels. While
one bucket is on its way the sender fills the next, and a receiver hashes the last.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.errors import Unavailable
from headway.messages import WeightManifest
from headway.weights.group import Transfer, WeightGroup
from headway.weights.manifest import Bucket, bucket_layout, digest_of
from headway.weights.packing import lies_packed, packed

_DEPTH = 2


def send(
    group: WeightGroup, manifest: WeightManifest, tensors: Mapping[str, Tensor], device: str
) -> None:
    """Broadcasts a manifest's tensors in order.

    EpochBroken when a member is lost, or when not all have everything within the group's
    deadline: many slow buckets together get no more time than one.
    """
    ends = time.monotonic() + group.timeout_s
    buckets = bucket_layout(manifest)
    as_it_lies = device == "cpu" and all(lies_packed(bucket, tensors) for bucket in buckets)
    buffers = [None] * _DEPTH if as_it_lies else _buffers(buckets, device)
    pending: deque[Transfer] = deque()
    try:
        for index, bucket in enumerate(buckets):
            if len(pending) == _DEPTH:
                pending.popleft().wait(ends)
            buffer = packed(bucket, tensors, buffers[index % _DEPTH])
            pending.append(group.start_broadcast(buffer))
        while pending:
            pending.popleft().wait(ends)
    finally:
        pending.clear()  # after an error they would hold the connections open


class Staging:
    """One version as it arrived, on the host, until the engine takes it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._manifest: WeightManifest | None = None
        self.digests: tuple[str, ...] = ()

    def receive(self, group: WeightGroup, manifest: WeightManifest, device: str) -> None:
        """Takes a whole broadcast and hashes what arrived. EpochBroken when it stops short."""
        ends = time.monotonic() + group.timeout_s
        buckets = self._make_room(manifest)
        on_host = device == "cpu"
        buffers = [] if on_host else _buffers(buckets, device)
        digests: list[str] = []
        pending: deque[tuple[Bucket, Tensor, Tensor, Transfer]] = deque()
        places = self._places(buckets)
        for index in range(len(buckets) + _DEPTH):
            if len(pending) == _DEPTH or (index >= len(buckets) and pending):
                bucket, place, buffer, transfer = pending.popleft()
                transfer.wait(ends)
                if not on_host:
                    place.copy_(buffer)
                digests += [_digest(place, s.offset, s.num_bytes) for s in bucket.slots]
            if index < len(buckets):
                bucket, place = buckets[index], places[index]
                buffer = place if on_host else buffers[index % _DEPTH][: bucket.num_bytes]
                pending.append((bucket, place, buffer, group.start_broadcast(buffer)))
        self._manifest = manifest
        self.digests = tuple(digests)

    def read(self, path: Path, manifest: WeightManifest) -> None:
        """Takes a snapshot from a file and hashes it. Unavailable when it cannot be read."""
        buckets = self._make_room(manifest)
        places = self._places(buckets)
        try:
            with path.open("rb", buffering=0) as file:
                for place in places:
                    _fill(place, file)
        except (OSError, EOFError) as error:
            raise Unavailable(f"the snapshot {path} cannot be read: {error}") from error
        self._manifest = manifest
        self.digests = tuple(
            _digest(place, s.offset, s.num_bytes)
            for bucket, place in zip(buckets, places, strict=True)
            for s in bucket.slots
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the order sent: views of the staging memory."""
        if self._manifest is None:
            raise RuntimeError("nothing was received")
        buckets = bucket_layout(self._manifest)
        for bucket, place in zip(buckets, self._places(buckets), strict=True):
            for slot in bucket.slots:
                flat = place[slot.offset : slot.offset + slot.num_bytes]
                dtype = getattr(torch, slot.spec.dtype)
                yield slot.spec.name, flat.view(dtype).reshape(slot.spec.shape)

    def _make_room(self, manifest: WeightManifest) -> tuple[Bucket, ...]:
        self._manifest = None
        buckets = bucket_layout(manifest)
        total = sum(bucket.num_bytes for bucket in buckets)
        if self._memory.numel() < total:
            self._memory = torch.empty(total, dtype=torch.uint8)
        return buckets

    def _places(self, buckets: tuple[Bucket, ...]) -> list[Tensor]:
        places, start = [], 0
        for bucket in buckets:
            places.append(self._memory[start : start + bucket.num_bytes])
            start += bucket.num_bytes
        return places


def _buffers(buckets: tuple[Bucket, ...], device: str) -> list[Tensor]:
    size = max((bucket.num_bytes for bucket in buckets), default=0)
    return [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(_DEPTH)]


def _fill(place: Tensor, file: RawIOBase) -> None:
    array: Any = place.numpy()
    left = memoryview(array)
    while left:
        count = file.readinto(left)
        if not count:
            raise EOFError("it ends too early")
        left = left[count:]


def _digest(place: Tensor, offset: int, num_bytes: int) -> str:
    return digest_of(place[offset : offset + num_bytes].numpy())
