"""A FleetService that assigns what a test says, and processes that report to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from queue import Empty, Queue
from typing import Any

import grpc

from headway.leash import leashed
from headway.pb import fleet_pb2, fleet_pb2_grpc
from headway.rpc import grpc_server

DEADLINE_S = 30.0


class Desk(fleet_pb2_grpc.FleetServiceServicer):
    """Level-triggered like the coordinator: every beat is answered with all assignments."""

    def __init__(self) -> None:
        self.address = ""
        self.nodes: dict[str, fleet_pb2.Node] = {}
        self.assignments: dict[str, fleet_pb2.Assignment] = {}  # the same for all nodes
        self.reports: dict[str, list[fleet_pb2.JobStatus]] = {}
        self.left: set[str] = set()

    async def Register(self, request: Any, context: Any) -> Any:
        self.nodes[request.node.node_id] = request.node
        return fleet_pb2.RegisterResponse(heartbeat_interval_s=0.1, lost_after_s=5.0)

    async def Heartbeat(self, request: Any, context: Any) -> Any:
        self.reports[request.node_id] = list(request.jobs)
        return fleet_pb2.HeartbeatResponse(assignments=self.assignments.values())

    async def Leave(self, request: Any, context: Any) -> Any:
        self.left.add(request.node_id)
        return fleet_pb2.LeaveResponse()

    def assign(self, job_id: str, spec_json: str, **fields: Any) -> None:
        self.assignments[job_id] = fleet_pb2.Assignment(
            job_id=job_id, spec_json=spec_json, **fields
        )

    async def reported(self, node_id: str, job_id: str, phase: str) -> fleet_pb2.JobStatus:
        """The report of a phase, as soon as it comes."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for status in self.reports.get(node_id, []):
                    if (status.job_id, status.phase) == (job_id, phase):
                        return status
                await asyncio.sleep(0.02)


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    served = Desk()

    def register(server: grpc.aio.Server) -> list[str]:
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(served, server)
        return ["headway.v1.FleetService"]

    async with grpc_server("127.0.0.1", 0, register) as port:
        served.address = f"127.0.0.1:{port}"
        yield served


class Service:
    """`python -m services.<name>`, started and read until it says where it listens."""

    def __init__(self, name: str, *flags: str, redis_url: str = "") -> None:
        self._process = subprocess.Popen(
            leashed([sys.executable, "-m", f"services.{name}", *flags], signal.SIGKILL),
            env={**os.environ, "HEADWAY_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._up: Queue[dict[str, Any] | None] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = ""

    async def ready(self) -> Service:
        """Returns when it listens."""
        try:
            row = await asyncio.to_thread(self._up.get, True, DEADLINE_S)
        except Empty:
            row = None
        assert row is not None, f"the service did not start: {self.lines}"
        self.address = row["address"]
        return self

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        """The exit code, once there is one."""
        code = await asyncio.to_thread(self._process.wait, DEADLINE_S)
        await asyncio.to_thread(self._reader.join)
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            try:
                row = json.loads(line)
            except ValueError:
                continue
            self.log.append(row)
            if "address" in row:
                self._up.put(row)
        self._up.put(None)
