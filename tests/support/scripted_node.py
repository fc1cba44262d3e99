"""A rollout node without an engine: real gRPC, real claims, completions made from the ticket.

A group depends on its ticket's seed alone, so that two runs of one job train on the
same groups whoever is killed in between.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import asynccontextmanager

import grpc

from headway.ledger.api import Lease, Ledger, Member
from headway.lifecycle import end_tasks
from headway.messages import Completion, Group, VersionSpan
from headway.patience import patiently
from headway.payloads import pack_group
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.rpc import grpc_server

SERVICE = "headway.v1.RolloutService"


def scripted_group(lease: Lease, node_id: str = "scripted") -> Group:
    """n completions of 3 to 6 tokens; every second one gets the reward."""
    ticket = lease.ticket
    rng = random.Random(ticket.seed)
    completions = []
    for i in range(ticket.n):
        length = rng.randint(3, 6)
        completions.append(
            Completion(
                token_ids=tuple(rng.randrange(3, 300) for _ in range(length)),
                logprobs=tuple(-5.0 - rng.random() for _ in range(length)),
                finish_reason="stop",
                spans=(VersionSpan(lease.start_version, 0, length),),
                text=f"answer {i}",
                reward=float(i % 2),
                parts={"correct": float(i % 2)},
            )
        )
    return Group(
        ticket=ticket,
        completions=tuple(completions),
        node_id=node_id,
        attempt=lease.attempt,
        start_version=lease.start_version,
        generate_s=0.25,
        score_s=0.125,
    )


class ScriptedNode(rollout_pb2_grpc.RolloutServiceServicer):
    """Announces itself, takes versions by RPC alone (transport none) and delivers groups."""

    def __init__(self, ledger: Ledger, make: Callable[[Lease], Group] = scripted_group) -> None:
        self.ledger = ledger
        self.make = make
        self.filter_reason = ""
        self.held_from: int | None = None  # tickets from this id on wait for `gate`
        self.gate = asyncio.Event()
        self.installed: list[int] = []
        self.delivered: list[tuple[int, int]] = []  # ticket id, version
        self._num_tokens = 0

    async def GetStatus(
        self, request: rollout_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GetStatusResponse:
        return rollout_pb2.GetStatusResponse(
            node_id="scripted", num_tokens_sampled=self._num_tokens, busy_s=0.0
        )

    async def InstallWeights(
        self, request: rollout_pb2.InstallWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.InstallWeightsResponse:
        self.installed.append(request.manifest.version)
        return rollout_pb2.InstallWeightsResponse(version=request.manifest.version)

    async def LeaveWeightGroup(
        self, request: rollout_pb2.LeaveWeightGroupRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.LeaveWeightGroupResponse:
        return rollout_pb2.LeaveWeightGroupResponse()

    @asynccontextmanager
    async def serving(self):
        """Runs while the block does."""

        def register(server: grpc.aio.Server) -> list[str]:
            rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, server)
            return [SERVICE]

        async with grpc_server("127.0.0.1", 0, register) as port:
            work = asyncio.create_task(self._work(f"127.0.0.1:{port}"))
            test = asyncio.current_task()
            work.add_done_callback(lambda done: done.cancelled() or test.cancel())
            try:
                yield self
            finally:
                if work.done():
                    work.result()  # a node that died fails its test instead of hanging it
                await end_tasks([work])

    async def _work(self, address: str) -> None:
        me = Member("scripted", address, "none")

        async def announce() -> None:
            await self.ledger.announce(me, ttl_s=60.0)

        while True:
            await patiently(announce)
            if self.installed:
                await self._serve_one()
            await asyncio.sleep(0.01)

    async def _serve_one(self) -> None:
        version = self.installed[-1]
        claimed = await patiently(lambda: self.ledger.claim("scripted", version, limit=8))
        for lease in claimed.leases:
            if self.held_from is not None and lease.ticket.ticket_id >= self.held_from:
                await self.gate.wait()
            group = self.make(lease)
            self._num_tokens += sum(len(c.token_ids) for c in group.completions)
            await self._deliver(lease, pack_group(group))
            self.delivered.append((lease.ticket.ticket_id, version))

    async def _deliver(self, lease: Lease, payload: bytes) -> None:
        await patiently(lambda: self.ledger.deliver(lease, payload, self.filter_reason))
