"""The coordinator as a running service: its Redis client, its servers, its loop."""

from __future__ import annotations

import asyncio

from headway.lifecycle import Lifecycle, end_tasks
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
from services.coordinator.tenure import Tenure

log = get_logger(__name__)


async def serve(
    settings: ServiceSettings, heartbeat_s: float, lost_after_s: float, lifecycle: Lifecycle
) -> None:
    """Serves until the lifecycle stops.

    Unavailable when Redis or a port cannot be had, Conflict when another coordinator has
    the Redis.
    """
    redis = connect(settings.redis_url)
    coordinator = Coordinator(JobStore(redis), FleetRegistry(lost_after_s))
    tenure = Tenure(redis)
    keeping: list[asyncio.Task[None]] = []
    try:
        await tenure.take()
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
            keeping.append(lifecycle.spawn(tenure.keep(), "tenure"))
            log.info(
                "the coordinator is up",
                extra={
                    "grpc_address": with_port(settings.advertise, grpc_port),
                    "http_address": http_url(settings.advertise, http_port),
                },
            )
            await lifecycle.wait_stopping()
    finally:
        await end_tasks(keeping)
        await tenure.leave()
        await redis.aclose()
