"""A whole fleet of real processes; without a model, unless asked: sim engines, the sim trainer.

    valkey <── links ──> coordinator, learner agent (its ranks), reward, rollout-0 … n-1

With `links`, each process reaches Redis and the coordinator through TCP links of its own.
A process that ends is started again only by the test, or by `tend`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import psutil

from headway.client import AsyncHeadwayClient
from headway.errors import HeadwayError
from headway.fleet.child import Child, ChildSpec, stop_children
from headway.jobs import JobRecord
from headway.journal import Journal
from headway.ledger.redis_ledger import RedisLedger
from headway.ports import free_port
from headway.redis_client import connect
from headway.valkey import EmbeddedValkey
from tests.support.proxy import Link

T = TypeVar("T")
HOST = "127.0.0.1"
FAR_S = 120.0  # a deadline that only a hang reaches


@dataclass(frozen=True)
class FleetShape:
    """How large, and how fast."""

    nodes: int = 2
    model: bool = False  # vLLM and the real trainer
    broadcast: int = 0  # nodes, the first ones, that really receive weights
    step_s: float = 0.02
    weight_mib: float = 0.0
    lengths: str = "uniform:12"
    tokens_per_s: float = 200.0
    lost_after_s: float = 4.0
    links: bool = False
    node_flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


def sim_job(data: Path, **changes: Any) -> dict[str, Any]:
    """A job of short steps; `changes` are dotted keys with __ for the dot."""
    if not data.exists():
        rows = [{"prompt": f"what is {i} + {i}?", "answer": str(2 * i)} for i in range(64)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job: dict[str, Any] = {
        "name": "sim",
        "model": {"path": "sim", "max_model_len": 1024},
        "data": {
            "source": "jsonl",
            "name": str(data),
            "train_batch_size": 4,
            "max_prompt_length": 64,
        },
        "reward": {"grader": {"type": "regex", "pattern": "[0-4]$", "match": "search"}},
        "algorithm": {"max_policy_lag": 2},
        "actor": {},
        "rollout": {"n": 2, "max_tokens": 256, "max_num_seqs": 8, "lease_s": 2.0,
                    "update_timeout_s": 3.0},
        "trainer": {"total_training_steps": 20, "save_freq": 4},
    }  # fmt: skip
    for key, value in changes.items():
        *path, leaf = key.split("__")
        section = job
        for part in path:
            section = section[part]
        section[leaf] = value
    return job


class SimFleet:
    """Use as `async with SimFleet(folder, shape) as fleet`."""

    def __init__(self, folder: Path, shape: FleetShape | None = None) -> None:
        self.folder = folder
        self.shape = shape or FleetShape()
        self.runs = folder / "runs"
        host = self.host_of("redis")
        self.valkey = EmbeddedValkey(folder / "valkey", free_port(), host=host)
        self.token: str | None = None  # of a user, where the fleet asks for one
        self.children: dict[str, Child] = {}
        self.links: dict[str, Link] = {}  # "<process>-redis", "<process>-coordinator"
        self._ports = {"coordinator": free_port(), "api": free_port()}
        self.api_url = f"http://{self.host_of('coordinator')}:{self._ports['api']}"

    async def __aenter__(self) -> Self:
        self.valkey.start()
        self.redis = connect(self.valkey.url)
        try:
            await self._launch_all()
            self.client = AsyncHeadwayClient(self.api_url, self.token)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if hasattr(self, "client"):
            await self.client.close()
        for child in self.children.values():
            for process in family(child):
                with suppress(psutil.Error):
                    process.resume()
        for link in self.links.values():  # nobody waits for a link that is down
            await link.turn("cut")
        stop_children(list(self.children.values()), 0.0, lambda: True)
        for link in self.links.values():
            await link.close()
        await self.redis.aclose()
        self.valkey.kill()

    # -- where they are; for fleets on more than one machine

    def host_of(self, name: str) -> str:
        """The address that a process (`redis` too) listens on."""
        return HOST

    def within(self, name: str) -> tuple[str, ...]:
        """What its command line begins with."""
        return ()

    # -- the processes

    async def _launch_all(self) -> None:
        shape = self.shape
        await self.launch(
            "coordinator",
            *("--port", str(self._ports["coordinator"]), "--http-port", str(self._ports["api"])),
            *("--heartbeat-s", "0.2", "--lost-after-s", str(shape.lost_after_s)),
        )
        await self.launch("reward", "--workers", "1")
        await self.launch(
            "learner",
            *("--runs-dir", str(self.runs), "--trainer", "fsdp" if shape.model else "sim"),
            *("--sim-step-s", str(shape.step_s), "--sim-weight-mib", str(shape.weight_mib)),
        )
        for number in range(shape.nodes):
            await self.add_node(number)
        await self.ready()

    async def add_node(self, number: int) -> Child:
        """Starts `rollout-<number>`."""
        shape = self.shape
        flags = ["--sim-broadcast"] if number < shape.broadcast else []
        return await self.launch(
            f"rollout-{number}",
            *("--engine", "vllm" if shape.model else "sim", "--sim-lengths", shape.lengths),
            *("--sim-tokens-per-s", str(shape.tokens_per_s), *flags, *shape.node_flags),
        )

    async def launch(self, name: str, *flags: str) -> Child:
        """Starts one process under its own name."""
        service = name.partition("-")[0]
        url = await self._redis_url(name)
        http_port = free_port()
        if service != "coordinator":
            flags = (
                *("--node-id", name, "--coordinator", await self._coordinator(name)),
                *("--http-port", str(http_port), *flags),
            )
        host = self.host_of(name)
        if host != HOST:
            flags = ("--host", host, *flags)
        http_address = self.api_url if service == "coordinator" else f"http://{host}:{http_port}"
        env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.shape.env}
        spec = ChildSpec(
            name=name,
            argv=(*self.within(name), sys.executable, "-m", f"services.{service}", *flags),
            env={**env, "HEADWAY_REDIS_URL": url},
            log=self.folder / "logs" / f"{name}.log",
            http_address=http_address,
        )
        self.children[name] = Child(spec)
        return self.children[name]

    async def ready(self) -> None:
        """Returns when every process answers its health check.

        One that found Redis too slow at its start (exit code 3) is started again.
        """

        async def look() -> bool:
            for child in self.children.values():
                if child.exit_code == 3:
                    child.restart()
                assert child.exit_code is None, f"{child.spec.name} ended: {child.last_words()}"
            checks = [asyncio.to_thread(child.ready) for child in self.children.values()]
            return all(await asyncio.gather(*checks))

        await eventually(look)

    async def _redis_url(self, name: str) -> str:
        target = (HOST, urlsplit(self.valkey.url).port or 0)
        if not self.shape.links:
            return self.valkey.url
        link = self.links[f"{name}-redis"] = await Link(target).open()
        return self.valkey.url.replace(f":{target[1]}/", f":{link.port}/")

    async def _coordinator(self, name: str) -> str:
        port = self._ports["coordinator"]
        if self.shape.links:
            link = self.links[f"{name}-coordinator"] = await Link((HOST, port)).open()
            port = link.port
        return f"{self.host_of('coordinator')}:{port}"

    # -- what befalls them

    def kill(self, name: str) -> None:
        """kill -9 of one process (`redis` and `rank` too); its end is awaited."""
        if name == "redis":
            self.valkey.kill()
            return
        for process in self.processes(name)[:1]:
            with suppress(psutil.Error):
                process.kill()
                process.wait(FAR_S)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to one process; to all of a rank's for `rank`."""
        for process in self.processes(name):
            with suppress(psutil.Error):
                process.send_signal(number)

    def processes(self, name: str) -> list[psutil.Process]:
        """The live processes of this name; `rank`: the learner's training processes."""
        if name == "redis":
            pid = self.valkey.pid
            return [psutil.Process(pid)] if pid is not None else []
        if name == "rank":
            return [p for p in family(self.children["learner"])[1:] if _is_rank(p)]
        process = self.children[name].record.process()
        return [process] if process is not None else []

    def restart(self, name: str) -> None:
        """Starts an ended process again, as a supervisor would."""
        if name == "redis":
            self.valkey.start()
        elif self.children[name].exit_code is not None:
            self.children[name].restart()

    async def tend(self, pause_s: Callable[[], float]) -> None:
        """Starts whatever ends again after a pause, for ever."""
        waits: dict[str, float] = {}
        clock = asyncio.get_running_loop().time
        while True:
            for name in (*self.children, "redis"):
                ended = (
                    not self.valkey.alive()
                    if name == "redis"
                    else self.children[name].exit_code is not None
                )
                if ended and name not in waits:
                    waits[name] = clock() + pause_s()
                elif ended and clock() >= waits[name]:
                    del waits[name]
                    self.restart(name)
            await asyncio.sleep(0.05)

    # -- the job

    async def submit(self, job: dict[str, Any], job_id: str) -> None:
        """Submits a job, queued until the fleet can run it."""
        await self.client.submit(job, job_id, queue=True)

    def ledger(self, job_id: str) -> RedisLedger:
        """A job's ledger, past all links."""
        return RedisLedger(self.redis, job_id)

    async def step(self, job_id: str) -> int:
        """Optimiser steps committed."""
        with suppress(HeadwayError):
            return (await self.ledger(job_id).counts()).step
        return -1

    async def seen_step(self, job_id: str, step: int, patience_s: float = FAR_S) -> None:
        """Returns when so many steps are committed."""

        async def look() -> bool:
            return await self.step(job_id) >= step

        await eventually(look, patience_s)

    async def ended(self, job_id: str, patience_s: float = FAR_S) -> JobRecord:
        """The job's record once it has ended."""

        async def look() -> JobRecord | None:
            with suppress(HeadwayError):
                record = await self.client.job(job_id)
                return record if record.ended else None
            return None

        return await eventually(look, patience_s)

    async def events(self, job_id: str) -> list[dict[str, Any]]:
        """A job's events so far."""
        return await Journal(self.redis, job_id).read_events(limit=10_000)


async def eventually(look: Callable[[], Awaitable[T | None]], patience_s: float = FAR_S) -> T:
    """What `look` gives as soon as it is neither None nor False; fails at a far deadline."""
    async with asyncio.timeout(patience_s):
        while True:
            found = await look()
            if found is not None and found is not False:
                return found
            await asyncio.sleep(0.02)


def family(child: Child) -> list[psutil.Process]:
    """A child and all its descendants that live."""
    process = child.record.process()
    if process is None:
        return []
    with suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return [process]


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "services.learner.train" in process.cmdline()
    return False
