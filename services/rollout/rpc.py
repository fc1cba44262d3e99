"""RolloutService over gRPC: protobuf in, the node's methods, protobuf out."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from headway import checked
from headway.codec import invite_from_pb, manifest_from_pb
from headway.pb import rollout_pb2, rollout_pb2_grpc
from services.rollout.node import RolloutNode


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Errors are HeadwayErrors; `headway.rpc` gives them their status."""

    def __init__(self, node: RolloutNode) -> None:
        self._node = node

    async def GetStatus(
        self, request: rollout_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GetStatusResponse:
        """What the node is doing; waits for nothing."""
        node, engine = self._node, self._node.engine
        return rollout_pb2.GetStatusResponse(
            node_id=node.worker.node_id,
            job_id=node.job_id,
            version=node.version,
            num_tickets_in_flight=node.num_tickets,
            num_completions_in_flight=engine.num_completions_in_flight if engine else 0,
            num_tokens_sampled=engine.num_tokens_sampled if engine else 0,
            busy_s=engine.busy_s if engine else 0.0,
        )

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.JoinWeightGroupResponse:
        """Returns when the seat is taken."""
        await self._node.join(invite_from_pb(request))
        return rollout_pb2.JoinWeightGroupResponse()

    async def InstallWeights(
        self, request: rollout_pb2.InstallWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.InstallWeightsResponse:
        """Returns when the version is verified and samples."""
        report = await self._node.install(
            request.job_id,
            request.epoch,
            manifest_from_pb(request.manifest),
            checked.seconds(request.timeout_s, "timeout_s"),
        )
        return rollout_pb2.InstallWeightsResponse(
            version=report.version, digest=report.digest, pause_s=report.pause_s
        )

    async def CatchUp(
        self, request: rollout_pb2.CatchUpRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.CatchUpResponse:
        """Returns when the version is fetched, verified and samples."""
        report = await self._node.catch_up(
            request.job_id,
            manifest_from_pb(request.manifest),
            request.snapshot_address,
            checked.seconds(request.timeout_s, "timeout_s"),
        )
        return rollout_pb2.CatchUpResponse(
            version=report.version, digest=report.digest, pause_s=report.pause_s
        )

    async def LeaveWeightGroup(
        self, request: rollout_pb2.LeaveWeightGroupRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.LeaveWeightGroupResponse:
        """Returns when the seat is given up."""
        await self._node.leave(request.job_id)
        return rollout_pb2.LeaveWeightGroupResponse()


def register(node: RolloutNode, server: grpc.aio.Server) -> Sequence[str]:
    """Adds the service to a server; its full name."""
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(node), server)
    return (rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name,)
