"""Tensors side by side, as their buckets are sent: laid out so from the start, or copied.

Weights that are staged in a `Room` lie in memory as they will travel, so sending them copies
nothing; the room serves one version after the other, without the cost of fresh memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.messages import TensorSpec, WeightManifest
from headway.weights.manifest import BUCKET_BYTES, Bucket, bucket_layout


class Room:
    """Host memory for one version at a time."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._loan: weakref.ref[memoryview] | None = None

    def lay_out(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors of any content, in the mapping's order, that lie packed.

        While anybody holds a tensor of the version before, the new ones get fresh memory.
        """
        name = str(dtype).removeprefix("torch.")
        specs = tuple(TensorSpec(n, name, tuple(shape), "") for n, shape in shapes.items())
        buckets = bucket_layout(WeightManifest(0, specs, BUCKET_BYTES))
        loan = self._lend(sum(bucket.num_bytes for bucket in buckets))
        tensors: dict[str, Tensor] = {}
        start = 0
        for bucket in buckets:
            for slot in bucket.slots:
                place = loan[start + slot.offset : start + slot.offset + slot.num_bytes]
                tensors[slot.spec.name] = place.view(dtype).reshape(slot.spec.shape)
            start += bucket.num_bytes
        return tensors

    def _lend(self, num_bytes: int) -> Tensor:
        in_use = self._loan is not None and self._loan() is not None
        if in_use or self._memory is None or len(self._memory) != num_bytes:
            self._memory = torch.zeros(max(1, num_bytes), dtype=torch.uint8).numpy()
        # the tensors' storage holds on to this object, and to nothing else of ours
        loan = memoryview(self._memory)
        self._loan = weakref.ref(loan)
        return torch.frombuffer(loan, dtype=torch.uint8)


def packed(bucket: Bucket, tensors: Mapping[str, Tensor], buffer: Tensor | None = None) -> Tensor:
    """A bucket's bytes [num_bytes], uint8.

    Copied to the start of `buffer`. Without one they are only copied when the tensors do not
    lie packed on the host already.
    """
    lying = _lying(bucket, tensors)
    if lying is not None and buffer is None:
        return lying
    if buffer is None:
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    place = buffer[: bucket.num_bytes]
    if lying is not None:
        return place.copy_(lying)
    for slot in bucket.slots:
        source = tensors[slot.spec.name].detach().contiguous().reshape(-1)
        place[slot.offset : slot.offset + slot.num_bytes].copy_(source.view(torch.uint8))
    return place


def lies_packed(bucket: Bucket, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a bucket's tensors lie on the host as they will be sent."""
    return _lying(bucket, tensors) is not None


def _lying(bucket: Bucket, tensors: Mapping[str, Tensor]) -> Tensor | None:
    first = tensors[bucket.slots[0].spec.name]
    storage, start = first.untyped_storage(), first.data_ptr()
    for slot in bucket.slots:
        tensor = tensors[slot.spec.name]
        if (
            tensor.device.type != "cpu"
            or not tensor.is_contiguous()
            or tensor.data_ptr() != start + slot.offset
            or tensor.untyped_storage().data_ptr() != storage.data_ptr()
        ):
            return None
    whole = torch.empty(0, dtype=torch.uint8)
    whole.set_(storage, start - storage.data_ptr(), (bucket.num_bytes,))  # type: ignore[call-overload]
    return whole
