"""A learner, a judge or a Redis that stands still: all wait, nothing grows, all drains after."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from headway.ledger.api import Counts
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.redis_client import command
from headway.rpc import channel
from tests.support.accounts import Accounts, accounts
from tests.support.sim_fleet import FleetShape, SimFleet, eventually, sim_job

pytestmark = pytest.mark.asyncio(loop_scope="module")
STEPS, BATCH, LAG, SLOTS, NODES = 30, 8, 2, 2, 2
OUTSTANDING = BATCH * (LAG + 2)
HELD = 3 * SLOTS - 1  # by a node: what one short of the bound on scoring still samples comes on top


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory):
    shape = FleetShape(nodes=NODES, lengths="constant:200", tokens_per_s=4000.0, step_s=0.01)
    async with SimFleet(tmp_path_factory.mktemp("fleet"), shape) as running:
        yield running


async def start(fleet: SimFleet, job_id: str, **changes: object) -> None:
    spec = sim_job(
        fleet.folder / "data.jsonl",
        data__train_batch_size=BATCH,
        rollout__max_num_seqs=2 * SLOTS,
        trainer__total_training_steps=STEPS,
        **changes,
    )
    await fleet.submit(spec, job_id)
    await fleet.seen_step(job_id, 3)


async def finish(fleet: SimFleet, job_id: str) -> Accounts:
    record = await fleet.ended(job_id)
    assert record.state == "succeeded", record.error
    found = await accounts(fleet.redis, job_id, fleet.runs / job_id)
    found.check(STEPS, BATCH, LAG)
    assert found.counts.expired_leases == 0
    # what was still being sampled when the job ended came too late
    assert found.counts.refused_deliveries <= found.counts.leased
    return found


async def tickets_held(fleet: SimFleet) -> list[int]:
    """What each node holds: sampling and waiting for scores or for the ledger."""
    nodes = [n for n in (await fleet.client.fleet())["nodes"] if n["role"] == "rollout"]
    held = []
    for node in nodes:
        async with channel(node["address"]) as link:
            stub = rollout_pb2_grpc.RolloutServiceStub(link)
            status = await stub.GetStatus(rollout_pb2.GetStatusRequest())
            held.append(status.num_tickets_in_flight)
    return held


@asynccontextmanager
async def standing_still(fleet: SimFleet, name: str) -> AsyncIterator[None]:
    """Within it, these processes get no time."""
    fleet.signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        fleet.signal(name, signal.SIGCONT)


@asynccontextmanager
async def memory_of_redis(fleet: SimFleet, limit: int) -> AsyncIterator[None]:
    """Within it, Redis refuses writes beyond `limit` bytes."""
    await command(fleet.redis, "CONFIG", "SET", "maxmemory", limit)
    try:
        yield
    finally:
        await command(fleet.redis, "CONFIG", "SET", "maxmemory", 0)


async def settled(fleet: SimFleet, job_id: str) -> Counts:
    """The counts once nothing has moved for a while; what is said of them holds before too."""
    ledger = fleet.ledger(job_id)
    seen: list[Counts] = []

    async def look() -> Counts | None:
        counts = await ledger.counts()
        if seen and seen[-1] != counts:
            seen.clear()
        seen.append(counts)
        return counts if len(seen) == 50 else None

    return await eventually(look)


async def test_a_learner_that_stands_still(fleet):
    await start(fleet, "learner")
    ledger = fleet.ledger("learner")

    async def all_is_delivered() -> bool:
        counts = await ledger.counts()
        assert counts.issued + counts.leased + counts.delivered <= OUTSTANDING
        return counts.leased == 0 and await tickets_held(fleet) == [0] * NODES

    async with standing_still(fleet, "rank"):
        await eventually(all_is_delivered)
    await finish(fleet, "learner")


async def test_a_judge_that_stands_still(fleet):
    await start(fleet, "judge")
    async with standing_still(fleet, "reward"):
        counts = await settled(fleet, "judge")
        assert counts.leased > 0
        # the leases of what waits are kept, and no more is claimed
        assert max(await tickets_held(fleet)) <= HELD
    await finish(fleet, "judge")


async def test_a_redis_that_is_full_of_trained_groups_is_emptied_by_a_checkpoint(fleet):
    used = (await fleet.redis.info("memory"))["used_memory"]
    async with memory_of_redis(fleet, used + (600 << 10)):
        await start(fleet, "trained", trainer__save_freq=0)
        found = await finish(fleet, "trained")
    assert "store_full" in {event["kind"] for event in await fleet.events("trained")}
    assert found.counts.held_bytes < 600 << 10


async def test_a_redis_that_is_full_of_other_things_is_waited_for(fleet):
    await start(fleet, "others")
    async with memory_of_redis(fleet, 1):
        counts = await settled(fleet, "others")
        assert counts.step < STEPS and counts.conserved
        assert counts.issued + counts.leased + counts.delivered <= OUTSTANDING
        assert max(await tickets_held(fleet)) <= HELD
    await finish(fleet, "others")
