"""A rollout node that only takes weights: its own process, real gRPC, real groups, no vLLM.

    python -m tests.support.weight_node PORT SHAPES_JSON SNAPSHOT_DIR [FATE WHEN]

Prints its port, then one line for each install: `how version digest`, where `how` is
broadcast or snapshot. FATE is what it does to itself: die (SIGKILL), hang (SIGSTOP), or
corrupt, which turns over one bit of what arrives. WHEN: at the start of an `install` or a
`catch_up`, or after so many broadcasts, in the middle of one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import grpc

from headway.codec import invite_from_pb, manifest_from_pb
from headway.messages import WeightManifest
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.rpc import grpc_server
from headway.weights.group import WeightGroup
from headway.weights.manifest import check_covers, check_digests, digest_of, tensor_bytes
from headway.weights.snapshot import snapshot_at_hand
from headway.weights.transfer import Staging

SERVICE = "headway.v1.RolloutService"


class Fate:
    """What befalls the node, and when."""

    def __init__(self, kind: str = "", when: str = "") -> None:
        self.kind = kind
        self.when = when

    def comes(self, when: str) -> None:
        """Dies or hangs here if that is the moment."""
        if when == self.when and self.kind in ("die", "hang"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "die" else signal.SIGSTOP)

    def corrupts(self, when: str) -> bool:
        """Whether what arrives here is spoilt."""
        return (self.kind, self.when) == ("corrupt", when)


class FatefulGroup:
    """A group whose process dies or hangs after some broadcasts."""

    def __init__(self, group: WeightGroup, fate: Fate) -> None:
        self._group = group
        self._fate = fate
        self._done = 0
        self.timeout_s = group.timeout_s

    def start_broadcast(self, tensor: Any) -> Any:
        """As the group's, until the end comes."""
        self._fate.comes(str(self._done))
        self._done += 1
        return self._group.start_broadcast(tensor)


class Node(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, shapes: dict[str, tuple[int, ...]], folder: str, fate: Fate) -> None:
        self._shapes = shapes
        self._folder = folder
        self._fate = fate
        self._group: WeightGroup | None = None

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.JoinWeightGroupResponse:
        self._group = await asyncio.to_thread(WeightGroup.join, invite_from_pb(request))
        return rollout_pb2.JoinWeightGroupResponse()

    async def InstallWeights(
        self, request: rollout_pb2.InstallWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.InstallWeightsResponse:
        self._fate.comes("install")
        manifest = manifest_from_pb(request.manifest)
        group: Any = FatefulGroup(self._group, self._fate) if self._group else None

        def fill(staging: Staging) -> None:
            staging.receive(group, manifest, "cpu")

        digest = await asyncio.to_thread(self._take_in, "broadcast", manifest, fill)
        return rollout_pb2.InstallWeightsResponse(
            version=manifest.version, digest=digest, pause_s=0.0
        )

    async def CatchUp(
        self, request: rollout_pb2.CatchUpRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.CatchUpResponse:
        self._fate.comes("catch_up")
        manifest = manifest_from_pb(request.manifest)
        at_hand = snapshot_at_hand(
            request.job_id, manifest, request.snapshot_address, self._folder, request.timeout_s
        )
        async with at_hand as path:

            def fill(staging: Staging) -> None:
                staging.read(path, manifest)

            digest = await asyncio.to_thread(self._take_in, "snapshot", manifest, fill)
        return rollout_pb2.CatchUpResponse(version=manifest.version, digest=digest, pause_s=0.0)

    async def LeaveWeightGroup(
        self, request: rollout_pb2.LeaveWeightGroupRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.LeaveWeightGroupResponse:
        if self._group is not None:
            self._group.close()
        return rollout_pb2.LeaveWeightGroupResponse()

    def _take_in(self, how: str, manifest: WeightManifest, fill: Callable[[Staging], None]) -> str:
        staging = Staging()
        fill(staging)
        check_covers(manifest, self._shapes, False, "this node")
        digests = staging.digests
        if self._fate.corrupts("install" if how == "broadcast" else "catch_up"):
            _, tensor = next(iter(staging.tensors()))
            tensor.view(-1)[0] += 1
            digests = (digest_of(tensor_bytes(tensor)), *digests[1:])
        digest = check_digests(manifest, digests, "what arrived")
        print(how, manifest.version, digest, flush=True)
        return digest


async def main() -> None:
    port, shapes, folder, *fate = sys.argv[1:]
    node = Node({n: tuple(s) for n, s in json.loads(shapes).items()}, folder, Fate(*fate))

    def register(server: grpc.aio.Server) -> list[str]:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(node, server)
        return [SERVICE]

    async with grpc_server("127.0.0.1", int(port), register) as bound:
        print(bound, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
