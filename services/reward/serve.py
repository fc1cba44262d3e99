"""The reward service as a whole: pool, scorer, two doors, and its place in the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from headway.fleet.agent import FleetAgent, describe_node
from headway.lifecycle import Lifecycle, end_tasks
from headway.pb import fleet_pb2, types_pb2
from headway.ports import with_port
from headway.rpc import grpc_server
from headway.settings import ServiceSettings
from headway.telemetry import get_logger
from headway.web import http_url, make_app, serve_http
from services.reward import metrics, rest, rpc, sandbox
from services.reward.grading.outcome import SandboxUnavailable
from services.reward.outside.lane import Lane, LaneSettings
from services.reward.request import ServiceLimits
from services.reward.scoring import Scorer
from services.reward.workers import PoolSettings, WorkerPool

log = get_logger(__name__)
_DRAIN_S = 20.0


@dataclass(frozen=True, slots=True)
class RewardServer:
    """A running service."""

    address: str  # gRPC, host:port
    http_address: str
    pool: WorkerPool
    scorer: Scorer


@asynccontextmanager
async def reward_server(
    host: str, port: int, http_port: int, pool_settings: PoolSettings, limits: ServiceLimits,
    lifecycle: Lifecycle, advertise: str = "", asking: LaneSettings | None = None,
) -> AsyncIterator[RewardServer]:  # fmt: skip
    """A service that scores while the block runs, then drains.

    Unavailable when a port is taken or no worker comes up.
    """
    pool = WorkerPool(pool_settings)
    lane = Lane(asking or LaneSettings())
    scorer = Scorer(pool, lane, limits)
    app = make_app(
        "Headway reward service",
        lambda: pool.num_ready > 0 and not scorer.draining,
        max_body_bytes=limits.max_wire_bytes,
    )
    rest.add_routes(app, scorer)
    try:
        await pool.start()
        feeding = lifecycle.spawn(pool.run(), "workers")
        async with (
            grpc_server(
                host,
                port,
                partial(rpc.register, scorer),
                max_request_bytes=limits.max_wire_bytes,
            ) as bound,
            serve_http(app, host, http_port) as http_bound,
        ):
            try:
                told = advertise or host
                address, http_address = with_port(told, bound), http_url(told, http_bound)
                yield RewardServer(address, http_address, pool, scorer)
            finally:
                lifecycle.stopping.set()
                await scorer.drain(_DRAIN_S)
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding
    finally:
        await lane.close()
        await pool.stop()


async def main(
    settings: ServiceSettings, pool: PoolSettings, limits: ServiceLimits, asking: LaneSettings,
    lifecycle: Lifecycle,
) -> None:  # fmt: skip
    """Serves until asked to stop."""
    address = (settings.host, settings.port, settings.http_port)
    async with reward_server(
        *address, pool, limits, lifecycle, settings.advertise, asking
    ) as server:
        log.info(
            "reward service ready",
            extra={"address": server.address, "http_address": server.http_address},
        )
        agent = _join(settings, server, lifecycle)
        trying = asyncio.create_task(_try_sandbox(), name="sandbox")
        await lifecycle.wait_stopping()
        await end_tasks([trying])
        if agent is not None:
            agent.draining = True
            await agent.leave()


async def _try_sandbox() -> None:
    """Says at the start whether code can be graded here. Each worker sees for itself again."""
    try:
        await asyncio.to_thread(sandbox.require)
    except SandboxUnavailable as error:
        metrics.SANDBOX_HOLDS.set(0)
        log.warning("graders that run code give null (sandbox_unavailable): %s", error)
    else:
        metrics.SANDBOX_HOLDS.set(1)


def _join(
    settings: ServiceSettings, server: RewardServer, lifecycle: Lifecycle
) -> FleetAgent | None:
    if not settings.coordinator:
        return None
    node = describe_node(settings, types_pb2.ROLE_REWARD, server.address, server.http_address)
    agent = FleetAgent(settings.coordinator, node, _reconcile, lambda: (), server.scorer.waits)
    lifecycle.spawn(agent.run(lifecycle), "fleet")
    return agent


async def _reconcile(assignments: Sequence[fleet_pb2.Assignment]) -> None:
    """A reward service serves every job: assignments change nothing here."""
