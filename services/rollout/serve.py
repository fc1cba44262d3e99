"""The rollout service as a whole: node, two doors, its place in the fleet, its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import Gauge

from headway.fleet.agent import FleetAgent, describe_node
from headway.lifecycle import Lifecycle
from headway.pb import types_pb2
from headway.ports import with_port
from headway.redis_client import connect, ping
from headway.rpc import grpc_server
from headway.settings import ServiceSettings
from headway.telemetry import get_logger
from headway.web import http_url, make_app, serve_http
from services.rollout import rpc
from services.rollout.door.routes import router
from services.rollout.engine import Engine
from services.rollout.engines import EngineSettings
from services.rollout.node import RolloutNode
from services.rollout.presence import WorkerSettings
from services.rollout.visits import Visits

log = get_logger(__name__)
MAX_BODY_BYTES = 4 << 20


async def main(
    settings: ServiceSettings,
    engine: EngineSettings,
    max_visits: int,
    drain_s: float,
    lifecycle: Lifecycle,
) -> None:
    """Serves until asked to stop, then drains for up to `drain_s`."""
    await ping(settings.redis_url)
    redis = connect(settings.redis_url)
    # the address is known once a port is bound, the node is needed to bind it
    visits = Visits(max_visits, engine.num_visitors)
    node = RolloutNode(WorkerSettings(settings.node_id, ""), engine, redis, visits=visits)
    agent: FleetAgent | None = None
    app = make_app(
        "Headway rollout node",
        lambda: agent is not None and agent.connected and not node.draining,
        max_body_bytes=MAX_BODY_BYTES,
    )
    app.include_router(router(visits))
    _measure(node)
    try:
        async with (
            grpc_server(settings.host, settings.port, partial(rpc.register, node)) as port,
            serve_http(app, settings.host, settings.http_port) as http_port,
        ):
            address = with_port(settings.advertise, port)
            http_address = http_url(settings.advertise, http_port)
            node.worker = WorkerSettings(settings.node_id, address)
            described = describe_node(
                settings, types_pb2.ROLE_ROLLOUT, address, http_address, len(engine.cores),
                engine.kind,
            )  # fmt: skip
            agent = FleetAgent(
                settings.coordinator, described, node.reconcile, node.statuses, node.waits
            )
            node.on_change = agent.nudge
            lifecycle.spawn(node.run(), "node")
            lifecycle.spawn(agent.run(lifecycle), "fleet")
            log.info("rollout node ready", extra={"address": address, "http_address": http_address})
            try:
                await lifecycle.wait_stopping()
            finally:
                agent.draining = node.draining = True
                await agent.beat_once()
                await node.drain(drain_s)
                await agent.leave()
    finally:
        await redis.aclose()


def _measure(node: RolloutNode) -> None:
    """Gauges that are read off the node whenever someone looks at /metrics."""

    def gauge(name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(f"headway_rollout_{name}", text).set_function(read)

    gauge("tickets_held", "Tickets this node works on", lambda: float(node.num_tickets))
    gauge(
        "weight_version",
        "Installed weight version; -1 before the first",
        lambda: -1.0 if node.version is None else float(node.version),
    )
    measure_engine(lambda: node.engine)


def measure_engine(engine: Callable[[], Engine | None]) -> None:
    """Gauges of the running engine, if there is one."""

    def gauge(name: str, text: str, attribute: str) -> None:
        read = partial(_read, engine, attribute)
        Gauge(f"headway_rollout_{name}", text).set_function(read)

    gauge("completions", "Completions being sampled", "num_completions_in_flight")
    gauge("tokens_sampled", "Tokens sampled since the engine began", "num_tokens_sampled")
    gauge("busy_seconds", "Seconds of sampling since the engine began", "busy_s")


def _read(engine: Callable[[], Engine | None], attribute: str) -> float:
    return float(getattr(engine(), attribute, 0))
