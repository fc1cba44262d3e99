"""A rollout node that only takes weights: its own process, real gRPC, real groups, no vLLM.

    python -m tests.support.weight_node NODE_ID SHAPES_JSON [die|hang AFTER_BROADCASTS]

Prints its port, then one line for each install: `version digest`. With `die` or `hang`
it kills or stops itself in the middle of a broadcast, after so many of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import grpc

from headway.codec import invite_from_pb, manifest_from_pb
from headway.messages import WeightManifest
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.rpc import grpc_server
from headway.weights.group import WeightGroup
from headway.weights.manifest import check_covers, check_digests
from headway.weights.transfer import Staging

SERVICE = "headway.v1.RolloutService"


class FatefulGroup:
    """A group whose process dies or hangs after some broadcasts."""

    def __init__(self, group: WeightGroup, fate: str, after: int) -> None:
        self._group = group
        self._fate = fate
        self._left = after

    def start_broadcast(self, tensor: Any) -> Any:
        """As the group's, until the end comes."""
        if self._fate and self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL if self._fate == "die" else signal.SIGSTOP)
        self._left -= 1
        return self._group.start_broadcast(tensor)


class Node(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, shapes: dict[str, tuple[int, ...]], fate: str, after: int) -> None:
        self._shapes = shapes
        self._fate = fate
        self._after = after
        self._group: WeightGroup | None = None

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.JoinWeightGroupResponse:
        self._group = await asyncio.to_thread(WeightGroup.join, invite_from_pb(request))
        return rollout_pb2.JoinWeightGroupResponse()

    async def InstallWeights(
        self, request: rollout_pb2.InstallWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.InstallWeightsResponse:
        manifest = manifest_from_pb(request.manifest)
        digest = await asyncio.to_thread(self._receive, manifest)
        print(manifest.version, digest, flush=True)
        return rollout_pb2.InstallWeightsResponse(
            version=manifest.version, digest=digest, pause_s=0.0
        )

    async def LeaveWeightGroup(
        self, request: rollout_pb2.LeaveWeightGroupRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.LeaveWeightGroupResponse:
        if self._group is not None:
            self._group.close()
        return rollout_pb2.LeaveWeightGroupResponse()

    def _receive(self, manifest: WeightManifest) -> str:
        staging = Staging()
        group: Any = FatefulGroup(self._group, self._fate, self._after)
        staging.receive(group, manifest, "cpu")
        check_covers(manifest, self._shapes, False, "this node")
        return check_digests(manifest, staging.digests, "what arrived")


async def main() -> None:
    shapes = {name: tuple(shape) for name, shape in json.loads(sys.argv[2]).items()}
    fate, after = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 3 else ("", 0)

    def register(server: grpc.aio.Server) -> list[str]:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Node(shapes, fate, after), server)
        return [SERVICE]

    async with grpc_server("127.0.0.1", 0, register) as port:
        print(port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
