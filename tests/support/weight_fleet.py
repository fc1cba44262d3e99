"""Weight nodes in processes of their own, who of them is announced, and what was told."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from headway.ledger.api import Member
from headway.rpc import grpc_server
from headway.weights.manifest import build_manifest, combined_digest
from headway.weights.publisher import Publisher
from headway.weights.snapshot import SharedFolder, SnapshotServer
from tests.support import weight_node
from tests.support.weight_node import Fate

# forked from a process that has imported all this, and in which nothing runs yet
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.weight_node"])

TIMEOUT_S = 4.0
BUCKET = 1 << 16
# larger than the sockets' buffers: a lost member surely stops the broadcast of these
LARGE = {f"t{i}": (1 << 20,) for i in range(8)}
SHAPES = {"a": (40, 1000), "b": (3,), "c": (90_000,), "d": (7, 11)}  # float32: 6 buckets


def tensors(seed: int, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) for n, s in (shapes or SHAPES).items()}


def digest(seed: int, shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    return combined_digest(t.digest for t in build_manifest(0, tensors(seed, shapes)).tensors)


@dataclass
class WeightFleet:
    """The nodes, and the learner's side of their weight group."""

    server: SnapshotServer
    folder: Path | None = None  # shared; else snapshots are streamed
    processes: dict[str, BaseProcess] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _pipes: dict[str, Any] = field(default_factory=dict)

    async def add(
        self,
        node_id: str,
        *fate: str,
        shapes: dict[str, tuple[int, ...]] | None = None,
        port: int = 0,
        session: str = "",
    ) -> None:
        """Starts a node and announces it."""
        self._pipes[node_id], theirs = _CONTEXT.Pipe()
        arguments = (theirs, port, shapes or SHAPES, str(self.folder or ""), Fate(*fate))
        process = _CONTEXT.Process(target=weight_node.run, args=arguments)
        await asyncio.to_thread(process.start)
        self.processes[node_id] = process
        address = f"127.0.0.1:{await self.line(node_id)}"
        self.members[node_id] = Member(node_id, address, "broadcast", session=session)

    async def line(self, node_id: str) -> str:
        """The next line that a node says."""
        assert await asyncio.to_thread(self._pipes[node_id].poll, 60), f"{node_id} says nothing"
        return str(self._pipes[node_id].recv())

    async def kill(self, node_id: str) -> None:
        """kill -9, and its end awaited. It stays announced."""
        self.processes[node_id].kill()
        await asyncio.to_thread(self.processes[node_id].join)

    def go_on(self, node_id: str) -> None:
        """Ends the stop of a node that hangs."""
        pid = self.processes[node_id].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)

    async def announced(self) -> list[Member]:
        return list(self.members.values())

    async def on_event(self, kind: str, message: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        """The fields of all events of a kind."""
        return [fields for k, fields in self.events if k == kind]

    def nodes(self, kind: str) -> list[str]:
        """The nodes that the events of a kind are about, in order."""
        return [fields["node_id"] for fields in self.kinds(kind)]

    def epochs(self) -> list[list[str]]:
        """The members of each epoch that stood."""
        return [fields["nodes"] for fields in self.kinds("epoch_formed")]

    def publisher(self) -> Publisher:
        offers = SharedFolder(self.folder, "job") if self.folder else self.server
        return Publisher(
            "job", self.announced, self.on_event, offers, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET
        )

    async def end(self) -> None:
        for node_id in self.processes:
            await self.kill(node_id)


@asynccontextmanager
async def weight_fleet() -> AsyncIterator[WeightFleet]:
    """A fleet without nodes, and the server of its snapshots."""
    server = SnapshotServer("job")
    fleet = WeightFleet(server)
    async with grpc_server("127.0.0.1", 0, server.register) as port:
        server.address = f"127.0.0.1:{port}"
        try:
            yield fleet
        finally:
            await fleet.end()


async def admitted(publisher: Publisher) -> None:
    """Returns when all who lack the newest version have caught up, or failed to."""
    await asyncio.gather(*await publisher.admit())
