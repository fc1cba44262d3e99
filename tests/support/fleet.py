"""A coordinator as a process, and nodes that say over real gRPC what a test scripts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from queue import Empty, Queue
from typing import Any, TypeVar

from redis.asyncio import Redis

from headway.jobspec import parse_job
from headway.leash import leashed
from headway.pb import fleet_pb2, fleet_pb2_grpc, types_pb2
from headway.redis_client import connect
from headway.rpc import channel

T = TypeVar("T")
DEADLINE_S = 20.0
SPEC = {
    "name": "sum",
    "model": {"path": "/models/tiny"},
    "data": {"source": "reasoning_gym", "name": "chain_sum"},
    "reward": {"grader": {"type": "reasoning_gym"}},
    "trainer": {"total_training_steps": 3},
}
RESOLVED = parse_job(SPEC).model_dump(mode="json")  # as records hold it
ROLES = {
    "learner": types_pb2.ROLE_LEARNER,
    "rollout": types_pb2.ROLE_ROLLOUT,
    "reward": types_pb2.ROLE_REWARD,
}


async def eventually(look: Callable[[], Awaitable[T | None]]) -> T:
    """What `look` gives as soon as it is neither None nor False; fails at a far deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await look()
            if found is not None and found is not False:
                return found
            await asyncio.sleep(0.03)


class CoordinatorProcess:
    """`python -m services.coordinator`, started and read until it says where it listens."""

    def __init__(self, redis_url: str, *flags: str, port: int = 0, http_port: int = 0) -> None:
        self._process = subprocess.Popen(
            leashed(
                [
                    *(sys.executable, "-m", "services.coordinator"),
                    *("--port", str(port), "--http-port", str(http_port), *flags),
                ],
                signal.SIGKILL,
            ),
            env={**os.environ, "HEADWAY_REDIS_URL": redis_url},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[dict[str, Any]] = []
        self._up: Queue[dict[str, Any] | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            row = self._up.get(timeout=DEADLINE_S)
        except Empty:
            row = None
        if row is None:
            self.kill()
            raise AssertionError(f"the coordinator did not start: {self.log}")
        self.grpc_address: str = row["grpc_address"]
        self.url: str = row["http_address"]

    @property
    def ports(self) -> dict[str, int]:
        """The ports it listens on, for a successor."""
        return {
            "port": int(self.grpc_address.rpartition(":")[2]),
            "http_port": int(self.url.rpartition(":")[2]),
        }

    def kill(self) -> None:
        """kill -9, and its end awaited."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(DEADLINE_S)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with suppress(ValueError):
                row = json.loads(line)
                self.log.append(row)
                if "grpc_address" in row:
                    self._up.put(row)
        self._up.put(None)


class ScriptedNode:
    """One process of the fleet that beats when told and says what it is told."""

    def __init__(self, address: str, node_id: str, role: str, pid: int = 1) -> None:
        self.node_id = node_id
        self._node = fleet_pb2.Node(
            node_id=node_id, role=ROLES[role], address=f"127.0.0.1:{1000 + len(node_id)}", pid=pid
        )
        self._channel = channel(address)
        self._stub = fleet_pb2_grpc.FleetServiceStub(self._channel)
        self.says: dict[str, fleet_pb2.JobStatus] = {}
        self.waits: list[fleet_pb2.Wait] = []

    async def register(self) -> ScriptedNode:
        """Registers and beats once, so that it can be given work."""
        await self._stub.Register(fleet_pb2.RegisterRequest(node=self._node), timeout=5)
        await self.beat()
        return self

    def say(self, job_id: str, phase: str, **more: Any) -> None:
        """What the next beats report of a job."""
        self.says[job_id] = fleet_pb2.JobStatus(job_id=job_id, phase=phase, **more)

    async def beat(self, draining: bool = False) -> dict[str, fleet_pb2.Assignment]:
        """One heartbeat; the assignments by job. What is not assigned is forgotten."""
        request = fleet_pb2.HeartbeatRequest(
            node_id=self.node_id,
            jobs=self.says.values(),
            draining=draining,
            waits=self.waits,
        )
        answer = await self._stub.Heartbeat(request, timeout=5, wait_for_ready=True)
        assert not answer.unknown_node, f"{self.node_id} is unknown"
        work = {a.job_id: a for a in answer.assignments}
        self.says = {job_id: s for job_id, s in self.says.items() if job_id in work}
        return work

    async def work(self, job_id: str) -> fleet_pb2.Assignment:
        """Beats until the job is assigned."""

        async def look() -> fleet_pb2.Assignment | None:
            return (await self.beat()).get(job_id)

        return await eventually(look)

    async def no_work(self) -> None:
        """Beats until nothing is assigned any more, then once to say that all is forgotten."""

        async def look() -> bool:
            return not await self.beat()

        await eventually(look)
        await self.beat()

    async def leave(self) -> None:
        """Leaves the fleet."""
        await self._stub.Leave(fleet_pb2.LeaveRequest(node_id=self.node_id), timeout=5)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


def own_db(url: str, number: int = 5) -> str:
    """A database of the server for one coordinator: their index of jobs is global."""
    return f"{url.removesuffix('/0')}/{number}"


@asynccontextmanager
async def emptied(url: str) -> AsyncIterator[Redis]:
    """A client of a store that holds nothing any more."""
    client = connect(url)
    await client.flushdb()
    yield client
    await client.aclose()


async def collect(updates: AsyncIterator[T]) -> list[T]:
    """All there is, in order."""
    return [update async for update in updates]
