"""Frozen messages <-> msgpack (ledger) and protobuf (gRPC). Nothing is unpickled."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from headway.errors import InvalidSpec
from headway.messages import (
    Completion,
    EpochInvite,
    Group,
    Score,
    ScoreItem,
    TensorSpec,
    Ticket,
    VersionSpan,
    WeightManifest,
)
from headway.pb import reward_pb2, rollout_pb2

T = TypeVar("T")
FORMAT = 1  # of ledger payloads; a reader refuses what it does not know


def pack_ticket(ticket: Ticket) -> bytes:
    """A ticket as msgpack."""
    return _pack(_ticket_fields(ticket))


def unpack_ticket(data: bytes) -> Ticket:
    """A ticket from msgpack; InvalidSpec when damaged."""
    return _unpack(data, _ticket_from)


def pack_group(group: Group) -> bytes:
    """A group as msgpack; token ids and log-probs as packed arrays (int32, float64)."""
    return _pack(
        [
            _ticket_fields(group.ticket),
            [_completion_fields(c) for c in group.completions],
            group.node_id,
            group.attempt,
            group.start_version,
            group.generate_s,
            group.score_s,
        ]
    )


def unpack_group(data: bytes) -> Group:
    """A group from msgpack; InvalidSpec when damaged."""
    return _unpack(data, _group_from)


def manifest_to_pb(manifest: WeightManifest) -> rollout_pb2.WeightManifest:
    """A weight manifest as protobuf."""
    tensors = [
        rollout_pb2.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, digest=t.digest)
        for t in manifest.tensors
    ]
    return rollout_pb2.WeightManifest(
        version=manifest.version, tensors=tensors, bucket_bytes=manifest.bucket_bytes
    )


def manifest_from_pb(message: rollout_pb2.WeightManifest) -> WeightManifest:
    """A weight manifest from protobuf."""
    tensors = tuple(TensorSpec(t.name, t.dtype, tuple(t.shape), t.digest) for t in message.tensors)
    return WeightManifest(message.version, tensors, message.bucket_bytes)


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
    """A seat in a weight group epoch from protobuf; InvalidSpec for an unknown backend."""
    if message.backend not in ("gloo", "nccl"):
        raise InvalidSpec(f"weight group backend {message.backend!r} is neither gloo nor nccl")
    return EpochInvite(
        job_id=message.job_id,
        epoch=message.epoch,
        store_host=message.store_host,
        store_port=message.store_port,
        rank=message.rank,
        world_size=message.world_size,
        backend="nccl" if message.backend == "nccl" else "gloo",
        timeout_s=message.timeout_s,
    )


def score_item_to_pb(item: ScoreItem) -> reward_pb2.ScoreItem:
    """An item to score as protobuf."""
    return reward_pb2.ScoreItem(
        prompt_json=json.dumps(item.prompt),
        completion=item.completion,
        item_json=json.dumps(dict(item.item)),
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
    """A score from protobuf; an absent reward is None, never zero."""
    return Score(
        reward=message.reward if message.HasField("reward") else None,
        parts=dict(message.parts),
        error_kind=message.error_kind,
        error_message=message.error_message,
        duration_s=message.duration_s,
    )


def _pack(fields: list[Any]) -> bytes:
    packed: bytes = msgpack.packb([FORMAT, fields], use_bin_type=True)
    return packed


def _unpack(data: bytes, build: Callable[[list[Any]], T]) -> T:
    try:
        version, fields = msgpack.unpackb(data, strict_map_key=True)
        if version != FORMAT:
            raise InvalidSpec(f"payload format {version} is not known to this Headway ({FORMAT})")
        return build(fields)
    except InvalidSpec:
        raise
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise InvalidSpec(f"damaged payload: {error}") from error


def _ints(values: tuple[int, ...]) -> bytes:
    return array("i", values).tobytes()


def _ints_from(data: bytes) -> tuple[int, ...]:
    values = array("i")
    values.frombytes(data)
    return tuple(values)


def _ticket_fields(ticket: Ticket) -> list[Any]:
    return [
        ticket.ticket_id,
        _ints(ticket.prompt_ids),
        ticket.prompt,
        dict(ticket.item),
        ticket.n,
        ticket.seed,
        ticket.data_epoch,
    ]


def _ticket_from(fields: list[Any]) -> Ticket:
    ticket_id, prompt_ids, prompt, item, n, seed, data_epoch = fields
    return Ticket(ticket_id, _ints_from(prompt_ids), prompt, item, n, seed, data_epoch)


def _completion_fields(completion: Completion) -> list[Any]:
    return [
        _ints(completion.token_ids),
        array("d", completion.logprobs).tobytes(),
        completion.finish_reason,
        [[s.version, s.start, s.end] for s in completion.spans],
        completion.text,
        completion.reward,
        dict(completion.parts),
        completion.error_kind,
        completion.error_message,
    ]


def _completion_from(fields: list[Any]) -> Completion:
    ids, raw_logprobs, finish, spans, text, reward, parts, kind, message = fields
    logprobs = array("d")
    logprobs.frombytes(raw_logprobs)
    return Completion(
        token_ids=_ints_from(ids),
        logprobs=tuple(logprobs),
        finish_reason=finish,
        spans=tuple(VersionSpan(*span) for span in spans),
        text=text,
        reward=reward,
        parts=parts,
        error_kind=kind,
        error_message=message,
    )


def _group_from(fields: list[Any]) -> Group:
    ticket, completions, node_id, attempt, start_version, generate_s, score_s = fields
    return Group(
        ticket=_ticket_from(ticket),
        completions=tuple(_completion_from(c) for c in completions),
        node_id=node_id,
        attempt=attempt,
        start_version=start_version,
        generate_s=generate_s,
        score_s=score_s,
    )
