"""The learner's gRPC calls to one rollout node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headway.codec import invite_to_pb, manifest_to_pb
from headway.errors import HeadwayError
from headway.ledger.api import Member
from headway.messages import EpochInvite, InstallReport, WeightManifest
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.rpc import channel, raise_headway

_GRACE_S = 2.0  # so that a node's own deadline error arrives before ours


class MemberClient:
    """One node's weight calls. All raise HeadwayErrors that name the node."""

    def __init__(self, job_id: str, member: Member) -> None:
        self.member = member
        self._job_id = job_id
        self._channel: grpc.aio.Channel | None = None

    async def join(self, invite: EpochInvite) -> None:
        """Returns when the node has its seat."""
        await self._call("JoinWeightGroup", invite_to_pb(invite), invite.timeout_s)

    async def install(
        self, epoch: int, manifest: WeightManifest, timeout_s: float
    ) -> InstallReport:
        """Returns when the node has verified and installed a version."""
        request = rollout_pb2.InstallWeightsRequest(
            job_id=self._job_id,
            epoch=epoch,
            manifest=manifest_to_pb(manifest),
            timeout_s=timeout_s,
        )
        answer = await self._call("InstallWeights", request, timeout_s)
        return InstallReport(answer.version, answer.digest, answer.pause_s)

    async def catch_up(
        self, address: str, manifest: WeightManifest, timeout_s: float
    ) -> InstallReport:
        """Returns when the node has fetched, verified and installed a version, however long.

        `address` is the SnapshotService's; empty: the node finds the file in its folder.
        """
        request = rollout_pb2.CatchUpRequest(
            job_id=self._job_id,
            manifest=manifest_to_pb(manifest),
            snapshot_address=address,
            timeout_s=timeout_s,
        )
        answer = await self._call("CatchUp", request, None)
        return InstallReport(answer.version, answer.digest, answer.pause_s)

    async def leave(self, timeout_s: float) -> None:
        """Takes the node's seat back; never raises, since the node may be gone."""
        request = rollout_pb2.LeaveWeightGroupRequest(job_id=self._job_id)
        try:
            await self._call("LeaveWeightGroup", request, timeout_s)
        except HeadwayError:
            return

    async def alive(self, timeout_s: float) -> bool:
        """Whether the node's server answers at all."""
        try:
            health: Any = health_pb2_grpc.HealthStub(self._link())
            await health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except (grpc.aio.AioRpcError, HeadwayError):
            return False
        return True

    async def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            await asyncio.shield(self._channel.close())

    def _link(self) -> grpc.aio.Channel:
        """Made when it is used: what a node announces as its address may be none."""
        if self._channel is None:
            self._channel = channel(self.member.address)
        return self._channel

    async def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        stub = rollout_pb2_grpc.RolloutServiceStub(self._link())
        try:
            return await getattr(stub, method)(request, timeout=timeout_s and timeout_s + _GRACE_S)
        except grpc.aio.AioRpcError as error:
            raise_headway(error, f"node {self.member.node_id} at {self.member.address}")


async def wait_for_survivors(calls: Mapping[asyncio.Task[Any], MemberClient]) -> None:
    """After a group broke: returns when all but the lost members have answered.

    Survivors say EpochBroken, soon when they notice the hang-up and at their own deadline
    otherwise; whose server does not answer either is not waited for.
    """
    _, silent = await asyncio.wait(calls, timeout=_GRACE_S)
    alive = await asyncio.gather(*(calls[call].alive(_GRACE_S) for call in silent))
    survivors = [call for call, answers in zip(silent, alive, strict=True) if answers]
    if survivors:
        await asyncio.wait(survivors)
