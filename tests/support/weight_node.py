"""A rollout node that only takes weights: its own process, real gRPC, real groups, no vLLM.

Says its port, then for each install `how version digest`, where `how` is broadcast or snapshot.
A fate is what it does to itself, and when. What: die (SIGKILL), hang (SIGSTOP), or corrupt,
which changes one number of what arrives. When: at the start of an `install` or a `catch_up`, or
after so many broadcasts, in the middle of one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import grpc
import torch

from headway.codec import invite_from_pb, manifest_from_pb
from headway.lifecycle import die_with_parent
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
    def __init__(
        self, pipe: Any, shapes: dict[str, tuple[int, ...]], folder: str, fate: Fate
    ) -> None:
        self._pipe = pipe
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
        self._pipe.send(f"{how} {manifest.version} {digest}")
        return digest


def run(pipe: Any, port: int, shapes: dict[str, tuple[int, ...]], folder: str, fate: Fate) -> None:
    """A node's life, in a process of its own."""
    die_with_parent()
    torch.set_num_threads(1)
    asyncio.run(_serve(Node(pipe, shapes, folder, fate), pipe, port))


async def _serve(node: Node, pipe: Any, port: int) -> None:
    def register(server: grpc.aio.Server) -> list[str]:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(node, server)
        return [SERVICE]

    async with grpc_server("127.0.0.1", port, register) as bound:
        pipe.send(str(bound))
        await asyncio.Event().wait()
