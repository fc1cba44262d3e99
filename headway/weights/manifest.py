"""What one publish sends: names, shapes and digests, and how they lie in packed buckets.

No torch at import: nodes that hold no tensors use this module too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from headway.errors import WeightMismatch
from headway.messages import AdapterBase, TensorSpec, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 64 << 20
_ALIGN = 64  # a tensor's first byte in its bucket: any dtype can be viewed there
_ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in its bucket; bytes."""

    spec: TensorSpec
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One broadcast: tensors side by side in one run of `num_bytes` bytes."""

    slots: tuple[Slot, ...]
    num_bytes: int


def tensor_bytes(tensor: Tensor) -> Any:
    """A tensor's bytes as a uint8 array; no copy when it is contiguous and on the CPU."""
    import torch

    # numpy knows no bfloat16, so the bytes are viewed, not converted
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def digest_of(data: Any) -> str:
    """xxh3-128 of a buffer, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def combined_digest(digests: Iterable[str]) -> str:
    """xxh3-128 over the per-tensor digests, in order: what an install reports."""
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


def is_dtype(name: str) -> bool:
    """Whether a bucket can hold tensors of this dtype."""
    return name in _ITEM_BYTES


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of one tensor. WeightMismatch for a dtype that no bucket can hold."""
    size = _ITEM_BYTES.get(spec.dtype)
    if size is None:
        raise WeightMismatch(f"tensor {spec.name}: dtype {spec.dtype} cannot be broadcast")
    return math.prod(spec.shape) * size


def build_manifest(
    version: int,
    tensors: Mapping[str, Tensor],
    bucket_bytes: int = BUCKET_BYTES,
    base: AdapterBase | None = None,
) -> WeightManifest:
    """The manifest of the tensors as they are now, in the mapping's order."""
    specs = tuple(
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            digest_of(tensor_bytes(tensor)),
        )
        for name, tensor in tensors.items()
    )
    return WeightManifest(version, specs, bucket_bytes, base)


def bucket_layout(manifest: WeightManifest) -> tuple[Bucket, ...]:
    """How both sides cut a manifest into buckets: in order, greedily.

    A bucket holds at most `bucket_bytes`, unless its only tensor is larger.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for spec in manifest.tensors:
        size = spec_bytes(spec)
        offset = -(-end // _ALIGN) * _ALIGN
        if slots and offset + size > manifest.bucket_bytes:
            buckets.append(Bucket(tuple(slots), end))
            slots, offset = [], 0
        slots.append(Slot(spec, offset, size))
        end = offset + size
    if slots:
        buckets.append(Bucket(tuple(slots), end))
    return tuple(buckets)


def check_covers(
    manifest: WeightManifest, expected: Mapping[str, tuple[int, ...]], tied: bool, where: str
) -> None:
    """Raises WeightMismatch, tensor named, unless a publish covers a model exactly.

    `expected` maps the model's tensor names to shapes. With `tied` embeddings a
    `lm_head.weight` may be absent on either side.
    """
    optional = {"lm_head.weight"} if tied else set()
    sent = {spec.name: spec for spec in manifest.tensors}
    if len(sent) != len(manifest.tensors):
        raise WeightMismatch(f"version {manifest.version} names a tensor twice")
    for name, shape in expected.items():
        if name in sent and sent[name].shape != shape:
            raise WeightMismatch(
                f"tensor {name}: the learner sends shape {list(sent[name].shape)}, {where} has"
                f" {list(shape)}; give both the same model folder"
            )
        if name not in sent and name not in optional:
            raise WeightMismatch(f"tensor {name}: {where} needs it, the learner does not send it")
    for name in sent:
        if name not in expected and name not in optional:
            raise WeightMismatch(f"tensor {name}: the learner sends it, {where} has none")
    head, embedding = sent.get("lm_head.weight"), sent.get("model.embed_tokens.weight")
    if tied and head and embedding and head.digest != embedding.digest:
        raise WeightMismatch(
            f"tensor lm_head.weight: differs from model.embed_tokens.weight, but {where} ties them"
        )


def check_digests(manifest: WeightManifest, arrived: Sequence[str], where: str) -> str:
    """The combined digest. WeightMismatch names the first tensor that differs."""
    for spec, digest in zip(manifest.tensors, arrived, strict=True):
        if spec.digest != digest:
            raise WeightMismatch(
                f"tensor {spec.name}: sent {spec.digest}, {where} has {digest}"
                f" (version {manifest.version})"
            )
    return combined_digest(arrived)
