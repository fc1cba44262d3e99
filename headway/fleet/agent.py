"""A process's membership in the fleet: register, heartbeat, follow, leave.

The coordinator's answer to a heartbeat is the whole desired state, so nothing is
lost when a message, the coordinator or this process fails: the next beat heals.
While the coordinator is away the last desired state holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc

from headway import __version__
from headway.lifecycle import Lifecycle
from headway.patience import away
from headway.pb import fleet_pb2, fleet_pb2_grpc, types_pb2
from headway.rpc import channel
from headway.settings import ServiceSettings
from headway.telemetry import get_logger
from headway.waits import Wait

log = get_logger(__name__)
_CALL_TIMEOUT_S = 5.0

Reconcile = Callable[[Sequence[fleet_pb2.Assignment]], Awaitable[None]]
Statuses = Callable[[], Sequence[fleet_pb2.JobStatus]]
Waits = Callable[[], Sequence[Wait]]


def describe_node(
    settings: ServiceSettings,
    role: types_pb2.Role.ValueType,
    address: str,
    http_address: str,
    num_cpus: int = 0,
    engine: str = "",
) -> fleet_pb2.Node:
    """This process as it registers. `num_cpus` 0: all of the machine's."""
    return fleet_pb2.Node(
        node_id=settings.node_id,
        role=role,
        address=address,
        http_address=http_address,
        engine=engine,
        num_cpus=num_cpus or os.cpu_count() or 0,
        num_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        software_version=__version__,
        pid=os.getpid(),
    )


class FleetAgent:
    """Keeps one process in the fleet and hands it its assignments.

    `reconcile` is awaited with every answer and must return soon: it starts and
    stops work, it does not do it. `statuses` and `waits` are asked before each beat.
    """

    def __init__(
        self,
        coordinator: str,
        node: fleet_pb2.Node,
        reconcile: Reconcile,
        statuses: Statuses,
        waits: Waits = lambda: (),
    ) -> None:
        self._coordinator = coordinator
        self._node = node
        self._reconcile = reconcile
        self._statuses = statuses
        self._waits = waits
        self._beat_now = asyncio.Event()
        self.connected = False
        self.draining = False

    def nudge(self) -> None:
        """Beats at once: something changed that the coordinator should know."""
        self._beat_now.set()

    async def run(self, lifecycle: Lifecycle) -> None:
        """Beats until the service stops, then leaves."""
        async with channel(self._coordinator) as link:
            stub = fleet_pb2_grpc.FleetServiceStub(link)
            interval_s = 1.0
            registered = False
            while not lifecycle.stopping.is_set():
                try:
                    if not registered:
                        interval_s = await self._register(stub)
                        registered = True
                    registered = await self._beat(stub)
                    self._connection(True)
                except grpc.aio.AioRpcError as error:
                    self._connection(False, error.details() or error.code().name)
                await self._pause(interval_s, lifecycle)

    async def leave(self) -> None:
        """Tells the coordinator that this process goes; nothing is awaited from it after."""
        async with channel(self._coordinator) as link:
            stub = fleet_pb2_grpc.FleetServiceStub(link)
            request = fleet_pb2.LeaveRequest(node_id=self._node.node_id)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Leave(request, timeout=_CALL_TIMEOUT_S)

    async def beat_once(self) -> None:
        """One last beat with the present statuses, for a process that is about to end."""
        async with channel(self._coordinator) as link:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._beat(fleet_pb2_grpc.FleetServiceStub(link))

    async def _register(self, stub: fleet_pb2_grpc.FleetServiceStub) -> float:
        request = fleet_pb2.RegisterRequest(node=self._node)
        answer = await stub.Register(request, timeout=_CALL_TIMEOUT_S)
        return float(answer.heartbeat_interval_s) or 1.0

    async def _beat(self, stub: fleet_pb2_grpc.FleetServiceStub) -> bool:
        waits = [*self._waits(), *filter(None, [away()])]
        request = fleet_pb2.HeartbeatRequest(
            node_id=self._node.node_id,
            jobs=self._statuses(),
            draining=self.draining,
            waits=[
                fleet_pb2.Wait(
                    job_id=w.job_id, reason=w.reason, detail=w.detail, waited_s=w.waited_s
                )
                for w in waits
            ],
        )
        answer = await stub.Heartbeat(request, timeout=_CALL_TIMEOUT_S)
        if answer.unknown_node:
            return False
        await self._reconcile(answer.assignments)
        return True

    async def _pause(self, seconds: float, lifecycle: Lifecycle) -> None:
        waits = [
            asyncio.create_task(self._beat_now.wait()),
            asyncio.create_task(lifecycle.stopping.wait()),
        ]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._beat_now.clear()

    def _connection(self, connected: bool, reason: str = "") -> None:
        if connected != self.connected:
            if connected:
                log.info("in touch with the coordinator at %s", self._coordinator)
            else:
                log.warning("lost the coordinator at %s: %s", self._coordinator, reason)
        self.connected = connected
