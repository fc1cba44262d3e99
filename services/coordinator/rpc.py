"""FleetService: protobuf at the edge, the coordinator's own values behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import grpc

from headway import checked
from headway.errors import InvalidSpec
from headway.pb import fleet_pb2, fleet_pb2_grpc, types_pb2
from headway.ports import checked_address
from headway.waits import REASONS, Reason, Wait
from services.coordinator.controller import Coordinator, Work
from services.coordinator.fleet import JobReport, Node, Role

_ROLES: dict[int, Role] = {
    types_pb2.ROLE_ROLLOUT: "rollout",
    types_pb2.ROLE_LEARNER: "learner",
    types_pb2.ROLE_REWARD: "reward",
}
_PHASES = frozenset({"starting", "running", "succeeded", "failed", "cancelled"})
_MAX_NAME = 200
_MAX_WAITS = 100
_MAX_JOBS = 1000
_MAX_TEXT = 4000  # of what a process says; the rest is in its own log


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """Serves FleetService."""

    def __init__(self, coordinator: Coordinator, heartbeat_interval_s: float) -> None:
        self._coordinator = coordinator
        self._heartbeat_interval_s = heartbeat_interval_s

    async def Register(
        self, request: fleet_pb2.RegisterRequest, context: object
    ) -> fleet_pb2.RegisterResponse:
        """Adds a process. INVALID_ARGUMENT when it does not say who it is."""
        await self._coordinator.register(_node(request.node))
        return fleet_pb2.RegisterResponse(
            heartbeat_interval_s=self._heartbeat_interval_s,
            lost_after_s=self._coordinator.registry.lost_after_s,
        )

    async def Heartbeat(
        self, request: fleet_pb2.HeartbeatRequest, context: object
    ) -> fleet_pb2.HeartbeatResponse:
        """What the process should do. UNAVAILABLE while Redis is away."""
        if len(request.jobs) > _MAX_JOBS:
            raise InvalidSpec(f"{len(request.jobs)} jobs: a process works on {_MAX_JOBS} at most")
        work = await self._coordinator.heartbeat(
            request.node_id,
            tuple(_report(status) for status in request.jobs),
            request.draining,
            tuple(_wait(wait) for wait in request.waits[:_MAX_WAITS] if wait.reason in REASONS),
        )
        if work is None:
            return fleet_pb2.HeartbeatResponse(unknown_node=True)
        return fleet_pb2.HeartbeatResponse(assignments=[_assignment(w) for w in work])

    async def Leave(
        self, request: fleet_pb2.LeaveRequest, context: object
    ) -> fleet_pb2.LeaveResponse:
        """Takes the process out."""
        await self._coordinator.leave(request.node_id)
        return fleet_pb2.LeaveResponse()


def register_fleet(
    coordinator: Coordinator, heartbeat_interval_s: float
) -> Callable[[grpc.aio.Server], Sequence[str]]:
    """Adds FleetService to a server, as `headway.rpc.grpc_server` asks for it."""

    def register(server: grpc.aio.Server) -> Sequence[str]:
        servicer = FleetServicer(coordinator, heartbeat_interval_s)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)
        return (fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name,)

    return register


def _node(message: fleet_pb2.Node) -> Node:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidSpec(f"node {message.node_id!r}: its role is not rollout, learner or reward")
    return Node(
        node_id=checked.label(message.node_id, "node_id"),
        role=role,
        address=checked_address(message.address),
        http_address=checked.text(message.http_address, "http_address", _MAX_NAME),
        engine=checked.text(message.engine, "engine", _MAX_NAME),
        num_cpus=checked.whole(message.num_cpus, "num_cpus"),
        num_gpus=checked.whole(message.num_gpus, "num_gpus"),
        software_version=checked.text(message.software_version, "software_version", _MAX_NAME),
        pid=checked.whole(message.pid, "pid"),
    )


def _report(status: fleet_pb2.JobStatus) -> JobReport:
    if status.phase not in _PHASES:
        raise InvalidSpec(f"job {status.job_id!r}: {status.phase!r} is not a phase")
    return JobReport(
        job_id=checked.label(status.job_id, "job_id"),
        phase=status.phase,
        detail=status.detail[:_MAX_TEXT],
        version=checked.whole(status.version, "version") if status.HasField("version") else None,
        error_kind=status.error_kind[:_MAX_NAME],
        run_dir=status.run_dir[:_MAX_TEXT],
    )


def _wait(wait: fleet_pb2.Wait) -> Wait:
    waited_s = wait.waited_s if math.isfinite(wait.waited_s) else 0.0
    return Wait(
        cast(Reason, wait.reason), wait.detail[:_MAX_TEXT], waited_s, wait.job_id[:_MAX_NAME]
    )


def _assignment(work: Work) -> fleet_pb2.Assignment:
    return fleet_pb2.Assignment(
        job_id=work.job_id,
        spec_json=work.spec_json,
        cancel=work.cancel,
        reward_addresses=work.reward_addresses,
        attempt=work.attempt,
    )
