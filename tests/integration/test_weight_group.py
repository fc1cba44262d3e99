"""Weight groups over real processes: broadcasts, deaths, hangs, newcomers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from headway.errors import EpochBroken, WeightMismatch
from headway.ledger.api import Member
from headway.messages import EpochInvite
from headway.weights.group import Rendezvous, WeightGroup
from headway.weights.manifest import build_manifest, combined_digest
from headway.weights.publisher import Publisher

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
class Fleet:
    """Nodes in processes of their own, and who of them is announced."""

    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def add(
        self, node_id: str, *fate: str, shapes: dict[str, tuple[int, ...]] | None = None
    ) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.support.weight_node", node_id, json.dumps(shapes or SHAPES), *fate),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.processes[node_id] = process
        port = int(await self.line(node_id))
        self.members[node_id] = Member(node_id, f"127.0.0.1:{port}", "broadcast")

    async def line(self, node_id: str) -> str:
        stdout = self.processes[node_id].stdout
        assert stdout is not None
        return (await asyncio.wait_for(stdout.readline(), 60)).decode().strip()

    async def announced(self) -> list[Member]:
        return list(self.members.values())

    async def on_event(self, kind: str, message: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [fields for k, fields in self.events if k == kind]

    def publisher(self) -> Publisher:
        return Publisher(
            "job", self.announced, self.on_event, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET
        )

    async def end(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    yield fleet
    await fleet.end()


async def test_every_member_of_three_gets_the_very_bytes(fleet: Fleet) -> None:
    await asyncio.gather(fleet.add("n1"), fleet.add("n2"))
    publisher = fleet.publisher()
    for version in (0, 1):
        report = await publisher.publish(version, tensors(version))
        assert set(report.installed) == {"n1", "n2"} and not report.lost and not report.rejected
        assert {r.digest for r in report.installed.values()} == {digest(version)}
        assert report.num_bytes == 4 * (40_000 + 3 + 90_000 + 77)
        for node_id in ("n1", "n2"):
            assert await fleet.line(node_id) == f"{version} {digest(version)}"
    await publisher.close()
    # one epoch served both versions, and each node joined once
    assert [e["nodes"] for e in fleet.kinds("epoch_formed")] == [["n1", "n2"]]
    assert sorted(e["node_id"] for e in fleet.kinds("member_joined")) == ["n1", "n2"]


@pytest.mark.parametrize("fate", ["die", "hang"])
async def test_a_member_lost_in_mid_broadcast_costs_one_deadline(fleet: Fleet, fate: str) -> None:
    await asyncio.gather(
        fleet.add("n1", shapes=LARGE),
        fleet.add("n2", fate, "3", shapes=LARGE),
        fleet.add("n3", shapes=LARGE),
    )
    publisher = fleet.publisher()
    report = await publisher.publish(5, tensors(5, LARGE))
    assert set(report.installed) == {"n1", "n3"} and set(report.lost) == {"n2"}
    assert await fleet.line("n1") == await fleet.line("n3") == f"5 {digest(5, LARGE)}"
    # the deadline of the broadcast and the survivors' grace, once; not once a survivor
    assert report.seconds < 2 * TIMEOUT_S + 4.0
    epochs = [e["nodes"] for e in fleet.kinds("epoch_formed")]
    # a survivor that had it all before the break need not take it again
    assert epochs[0] == ["n1", "n2", "n3"] and len(epochs) == 2 and "n2" not in epochs[1]
    assert [e["node_id"] for e in fleet.kinds("member_lost")] == ["n2"]
    del fleet.members["n2"]
    again = await publisher.publish(6, tensors(6, LARGE))
    assert set(again.installed) == {"n1", "n3"}
    assert fleet.kinds("epoch_formed")[-1]["nodes"] == ["n1", "n3"]
    await publisher.close()


async def test_a_node_that_died_before_the_epoch_is_left_out_at_once(fleet: Fleet) -> None:
    await asyncio.gather(fleet.add("n1"), fleet.add("n2"))
    fleet.processes["n2"].send_signal(signal.SIGKILL)
    await fleet.processes["n2"].wait()
    publisher = fleet.publisher()
    report = await publisher.publish(0, tensors(0))
    assert set(report.installed) == {"n1"} and set(report.lost) == {"n2"}
    await publisher.close()


async def test_a_newcomer_is_admitted_without_disturbing_the_others(fleet: Fleet) -> None:
    await fleet.add("n1")
    publisher = fleet.publisher()
    await publisher.publish(0, tensors(0))
    assert await publisher.admit() is None
    await fleet.add("n2")
    report = await publisher.admit()
    assert report is not None and set(report.installed) == {"n2"} and report.version == 0
    assert await fleet.line("n2") == f"0 {digest(0)}"
    both = await publisher.publish(1, tensors(1))
    assert set(both.installed) == {"n1", "n2"}
    # n1 saw version 0 once only
    assert await fleet.line("n1") == f"0 {digest(0)}"
    assert await fleet.line("n1") == f"1 {digest(1)}"
    await publisher.close()


async def test_weights_without_members_wait_for_the_first(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    report = await publisher.publish(0, tensors(0))
    assert report.installed == {} and report.lost == {}
    await fleet.add("n1")
    admitted = await publisher.admit()
    assert admitted is not None and set(admitted.installed) == {"n1"}
    await publisher.close()


async def test_s015_a_node_with_another_shape_is_left_out_by_name(fleet: Fleet) -> None:
    padded = {**SHAPES, "b": (4,)}
    await asyncio.gather(fleet.add("n1"), fleet.add("n2", shapes=padded))
    publisher = fleet.publisher()
    report = await publisher.publish(0, tensors(0))
    assert set(report.installed) == {"n1"} and set(report.rejected) == {"n2"}
    assert "tensor b" in report.rejected["n2"] and "[4]" in report.rejected["n2"]
    lost = fleet.kinds("member_lost")
    assert [(e["node_id"], e["reason"], e["level"]) for e in lost] == [
        ("n2", "weight_mismatch", "error")
    ]
    # the broadcast went to its end for the good one: no second epoch was needed
    assert len(fleet.kinds("epoch_formed")) == 1
    await publisher.close()


async def test_s015_weights_that_fit_no_node_fail_the_publish(fleet: Fleet) -> None:
    await fleet.add("n1", shapes={**SHAPES, "b": (4,)})
    publisher = fleet.publisher()
    with pytest.raises(WeightMismatch, match="tensor b: the learner sends shape"):
        await publisher.publish(0, tensors(0))
    await publisher.close()


async def test_a_rendezvous_without_the_others_ends_at_its_deadline() -> None:
    meeting = Rendezvous("127.0.0.1", 1.0)
    invite = EpochInvite("job", 1, "127.0.0.1", meeting.port, 0, 2, "gloo", 1.0)
    started = time.monotonic()
    with pytest.raises(EpochBroken, match="rank 0 of 2"):
        await asyncio.to_thread(WeightGroup.join, invite, "cpu", meeting.store)
    assert time.monotonic() - started < 10.0


async def test_a_closed_group_ends_the_others_wait_and_stays_closed() -> None:
    meeting = Rendezvous("127.0.0.1", 30.0)
    invites = [EpochInvite("j", 1, "127.0.0.1", meeting.port, r, 2, "gloo", 30.0) for r in (0, 1)]
    sender, member = await asyncio.gather(
        asyncio.to_thread(WeightGroup.join, invites[0], "cpu", meeting.store),
        asyncio.to_thread(WeightGroup.join, invites[1]),
    )
    entered = threading.Event()

    def wait() -> None:
        transfer = member.start_broadcast(torch.empty(4, dtype=torch.uint8))
        entered.set()
        transfer.wait()

    waiting = asyncio.create_task(asyncio.to_thread(wait))
    await asyncio.to_thread(entered.wait)
    started = time.monotonic()
    sender.close()
    with pytest.raises(EpochBroken, match="epoch 1"):
        await waiting
    assert time.monotonic() - started < 15.0  # half its deadline
    with pytest.raises(EpochBroken, match="was closed"):
        sender.broadcast(torch.zeros(4, dtype=torch.uint8))
