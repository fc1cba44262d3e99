"""The agent's process: its fleet membership, its gRPC and its health endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc

from headway.fleet.agent import FleetAgent, describe_node
from headway.lifecycle import Lifecycle
from headway.pb import learner_pb2_grpc, types_pb2
from headway.ports import with_port
from headway.rpc import grpc_server
from headway.settings import ServiceSettings
from headway.web import http_url, make_app, serve_http
from services.learner.agent import AgentSettings, LearnerAgent
from services.learner.rpc import SERVICE_NAME, LearnerServicer
from services.learner.trainer_settings import TrainerSettings


async def serve(
    settings: ServiceSettings,
    runs_dir: Path,
    cores: tuple[int, ...],
    trainer: TrainerSettings,
    lifecycle: Lifecycle,
) -> None:
    """Serves until asked to stop; then the ranks are killed, and resume elsewhere."""
    fleet: FleetAgent | None = None

    def changed() -> None:
        if fleet is not None:
            fleet.nudge()

    agent = LearnerAgent(
        AgentSettings(
            runs_dir, settings.redis_url, settings.advertise, cores, settings.log_level, trainer
        ),
        changed,
    )

    def register(server: grpc.aio.Server) -> Sequence[str]:
        servicer = LearnerServicer(agent, settings.node_id)
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(servicer, server)
        return (SERVICE_NAME,)

    app = make_app("learner", lambda: fleet is not None and fleet.connected)
    async with (
        grpc_server(settings.host, settings.port, register) as port,
        serve_http(app, settings.host, settings.http_port) as http_port,
    ):
        node = describe_node(
            settings, types_pb2.ROLE_LEARNER, with_port(settings.advertise, port),
            http_url(settings.advertise, http_port), len(cores),
        )  # fmt: skip
        fleet = FleetAgent(settings.coordinator, node, agent.reconcile, agent.statuses, agent.waits)
        lifecycle.spawn(fleet.run(lifecycle), "fleet")
        try:
            await lifecycle.wait_stopping()
        finally:
            await agent.stop()
            await fleet.leave()
