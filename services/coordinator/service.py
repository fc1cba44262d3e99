"""The coordinator as a running service: its Redis client, its servers, its loop."""

from __future__ import annotations

from headway.lifecycle import Lifecycle
from headway.ports import with_port
from headway.redis_client import connect
from headway.rpc import grpc_server
from headway.settings import ServiceSettings
from headway.telemetry import get_logger
from headway.web import http_url, serve_http
from services.coordinator.controller import Coordinator
from services.coordinator.fleet import FleetRegistry
from services.coordinator.rest import build_app
from services.coordinator.rpc import register_fleet
from services.coordinator.store import JobStore

log = get_logger(__name__)


async def serve(
    settings: ServiceSettings, heartbeat_s: float, lost_after_s: float, lifecycle: Lifecycle
) -> None:
    """Serves until the lifecycle stops. Unavailable when Redis or a port cannot be had."""
    redis = connect(settings.redis_url)
    coordinator = Coordinator(JobStore(redis), FleetRegistry(lost_after_s))
    try:
        await coordinator.reconcile()  # knows the jobs before the first node says hello
        async with (
            grpc_server(
                settings.host, settings.port, register_fleet(coordinator, heartbeat_s)
            ) as grpc_port,
            serve_http(
                build_app(coordinator, lifecycle.stopping), settings.host, settings.http_port
            ) as http_port,
        ):
            lifecycle.spawn(coordinator.run(), "reconcile")
            log.info(
                "the coordinator is up",
                extra={
                    "grpc_address": with_port(settings.advertise, grpc_port),
                    "http_address": http_url(settings.advertise, http_port),
                },
            )
            await lifecycle.wait_stopping()
    finally:
        await redis.aclose()
