"""Frozen messages <-> protobuf (gRPC). What is read is checked: InvalidSpec when it cannot be.

Ledger payloads are `headway.payloads`.
"""

from __future__ import annotations

import json
import re

from headway import checked
from headway.errors import InvalidSpec
from headway.messages import (
    AdapterBase,
    EpochInvite,
    Score,
    ScoreItem,
    TensorSpec,
    WeightManifest,
)
from headway.pb import reward_pb2, rollout_pb2
from headway.ports import is_host
from headway.weights.manifest import is_dtype

_MAX_TENSORS = 1 << 20
_MAX_AXES = 16
_MAX_TENSOR_ITEMS = 1 << 44
_MAX_WORLD = 1 << 16
_DIGEST = re.compile(r"[0-9a-f]{32}")


def manifest_to_pb(manifest: WeightManifest) -> rollout_pb2.WeightManifest:
    """A weight manifest as protobuf."""
    tensors = [
        rollout_pb2.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, digest=t.digest)
        for t in manifest.tensors
    ]
    base = None
    if manifest.base is not None:
        base = rollout_pb2.AdapterBase(digest=manifest.base.digest, scale=manifest.base.scale)
    return rollout_pb2.WeightManifest(
        version=manifest.version, tensors=tensors, bucket_bytes=manifest.bucket_bytes, base=base
    )


def manifest_from_pb(message: rollout_pb2.WeightManifest) -> WeightManifest:
    """A weight manifest from protobuf; InvalidSpec for what no learner would send."""
    if len(message.tensors) > _MAX_TENSORS:
        raise InvalidSpec(f"a manifest has at most {_MAX_TENSORS} tensors")
    return WeightManifest(
        checked.whole(message.version, "version"),
        tuple(_tensor_from(tensor) for tensor in message.tensors),
        checked.whole(message.bucket_bytes, "bucket_bytes", 0, 1 << 40),
        _base_from(message.base) if message.HasField("base") else None,
    )


def invite_to_pb(invite: EpochInvite) -> rollout_pb2.JoinWeightGroupRequest:
    """A seat in a weight group epoch as protobuf."""
    return rollout_pb2.JoinWeightGroupRequest(
        job_id=invite.job_id,
        epoch=invite.epoch,
        store_host=invite.store_host,
        store_port=invite.store_port,
        rank=invite.rank,
        world_size=invite.world_size,
        backend=invite.backend,
        timeout_s=invite.timeout_s,
    )


def invite_from_pb(message: rollout_pb2.JoinWeightGroupRequest) -> EpochInvite:
    """A seat in a weight group epoch from protobuf; InvalidSpec when it can be none."""
    if message.backend not in ("gloo", "nccl"):
        raise InvalidSpec(f"weight group backend {message.backend!r} is neither gloo nor nccl")
    if not is_host(message.store_host):
        raise InvalidSpec(f"store_host {message.store_host[:80]!r} is no host")
    world_size = checked.whole(message.world_size, "world_size", 1, _MAX_WORLD)
    return EpochInvite(
        job_id=checked.label(message.job_id, "job_id"),
        epoch=checked.whole(message.epoch, "epoch"),
        store_host=message.store_host,
        store_port=checked.whole(message.store_port, "store_port", 1, 65535),
        rank=checked.whole(message.rank, "rank", 0, world_size - 1),
        world_size=world_size,
        backend="nccl" if message.backend == "nccl" else "gloo",
        timeout_s=checked.seconds(message.timeout_s, "timeout_s"),
    )


def score_item_to_pb(item: ScoreItem) -> reward_pb2.ScoreItem:
    """An item to score as protobuf."""
    return reward_pb2.ScoreItem(
        prompt_json=json.dumps(item.prompt),
        completion=item.completion,
        item_json=json.dumps(dict(item.item)),
        group=item.group,
        num_tokens=item.num_tokens,
    )


def score_to_pb(score: Score) -> reward_pb2.ScoreResult:
    """A score as protobuf; a null reward stays absent."""
    return reward_pb2.ScoreResult(
        reward=score.reward,
        parts=score.parts,
        error_kind=score.error_kind,
        error_message=score.error_message,
        duration_s=score.duration_s,
    )


def score_from_pb(message: reward_pb2.ScoreResult) -> Score:
    """A score from protobuf; an absent reward is None, never zero. InvalidSpec: not finite."""
    reward = checked.number(message.reward, "reward") if message.HasField("reward") else None
    return Score(
        reward=reward,
        parts={name: checked.number(part, name[:80]) for name, part in message.parts.items()},
        error_kind=message.error_kind,
        error_message=message.error_message,
        duration_s=message.duration_s,
    )


def _base_from(message: rollout_pb2.AdapterBase) -> AdapterBase:
    if not _DIGEST.fullmatch(message.digest):
        raise InvalidSpec(f"base: {message.digest[:80]!r} is no digest")
    return AdapterBase(message.digest, checked.number(message.scale, "scale"))


def _tensor_from(message: rollout_pb2.TensorSpec) -> TensorSpec:
    name = checked.label(message.name, "tensor", 1000)
    if not is_dtype(message.dtype):
        raise InvalidSpec(f"tensor {name[:80]}: dtype {message.dtype[:80]!r} is not known")
    if len(message.shape) > _MAX_AXES:
        raise InvalidSpec(f"tensor {name[:80]} has {len(message.shape)} axes")
    num_items = 1
    for length in message.shape:
        num_items *= checked.whole(length, f"tensor {name[:80]}: axis", 0, _MAX_TENSOR_ITEMS)
        checked.whole(num_items, f"tensor {name[:80]}: items", 0, _MAX_TENSOR_ITEMS)
    if not _DIGEST.fullmatch(message.digest):
        raise InvalidSpec(f"tensor {name[:80]}: {message.digest[:80]!r} is no digest")
    return TensorSpec(name, message.dtype, tuple(message.shape), message.digest)
