"""kill -9 of each process of a fleet: the job goes on, finishes, and its accounts balance.

Real processes, real gRPC, a real weight group; sim engines and the sim trainer. One fleet
serves all tests, each with a job of its own.
"""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
import pytest_asyncio

from headway.patience import patiently
from tests.support.accounts import Accounts, accounts
from tests.support.sim_fleet import FleetShape, SimFleet, eventually, sim_job

pytestmark = pytest.mark.asyncio(loop_scope="module")
STEPS, BATCH, LAG = 40, 4, 2
_NUMBERS = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    shape = FleetShape(nodes=2, broadcast=2, step_s=0.05, weight_mib=1.0)
    async with SimFleet(folder, shape) as running:
        yield running


class Job:
    """One job on the fleet, and what becomes of it."""

    def __init__(self, fleet: SimFleet) -> None:
        self.fleet = fleet
        self.id = f"job-{next(_NUMBERS)}"
        self.folder = fleet.runs / self.id

    async def submit(self, at_step: int = 3, **changes: object) -> Job:
        """Returns when it has done a few steps."""
        spec = sim_job(
            self.fleet.folder / "data.jsonl", trainer__total_training_steps=STEPS, **changes
        )
        await self.fleet.submit(spec, self.id)
        await self.fleet.seen_step(self.id, at_step)
        return self

    async def finish(self) -> Accounts:
        """Its balanced accounts after it has succeeded."""
        record = await self.fleet.ended(self.id)
        assert record.state == "succeeded", record.error
        found = await accounts(self.fleet.redis, self.id, self.folder)
        found.check(STEPS, BATCH, LAG)
        return found

    async def publish_hangs(self) -> None:
        """Returns while a version is committed that a stopped node keeps from being published."""
        ledger = self.fleet.ledger(self.id)
        step = (await ledger.counts()).step

        async def look() -> bool:
            return (await ledger.counts()).step > step

        await eventually(look)

    async def stopped_in_a_checkpoint(self) -> list[Path]:
        """Stops the rank while a checkpoint's draft is there; the drafts."""
        folder = self.folder / "checkpoints"
        while True:
            while not list(folder.glob(".tmp-step-*")):
                assert not (self.folder / "report.html").exists(), "the job has ended"
            self.fleet.signal("rank", signal.SIGSTOP)
            if drafts := list(folder.glob(".tmp-step-*")):
                return drafts
            self.fleet.signal("rank", signal.SIGCONT)


async def test_a_rollout_node_idle_sampling_and_in_the_middle_of_a_broadcast(fleet):
    fleet.kill("rollout-0")
    fleet.restart("rollout-0")
    await fleet.ready()
    job = await Job(fleet).submit(rollout__min_nodes=2)
    fleet.kill("rollout-0")  # it samples
    fleet.restart("rollout-0")
    fleet.signal("rollout-1", signal.SIGSTOP)
    await job.publish_hangs()
    fleet.kill("rollout-1")
    await fleet.seen_step(job.id, await fleet.step(job.id) + 2)
    fleet.restart("rollout-1")
    await job.finish()
    missed = [e for e in await fleet.events(job.id) if e["kind"] == "weights_missed"]
    assert "rollout-1" in {event["node_id"] for event in missed}


async def test_a_learner_rank_in_the_middle_of_a_step_a_publish_and_a_checkpoint(fleet):
    job = await Job(fleet).submit()
    ledger = fleet.ledger(job.id)

    async def taken() -> bool:
        return (await ledger.counts()).taken == BATCH

    await eventually(taken)
    fleet.kill("rank")
    await fleet.seen_step(job.id, await fleet.step(job.id) + 1)
    fleet.signal("rollout-0", signal.SIGSTOP)
    await job.publish_hangs()
    fleet.kill("rank")
    fleet.signal("rollout-0", signal.SIGCONT)
    await fleet.seen_step(job.id, await fleet.step(job.id) + 1)
    drafts = await job.stopped_in_a_checkpoint()
    fleet.kill("rank")
    assert all(draft.exists() for draft in drafts)
    await job.finish()
    assert not list((job.folder / "checkpoints").glob(".tmp-step-*"))
    said = [e["message"] for e in await fleet.events(job.id) if e["kind"] == "starting"]
    assert sum("resumed" in text or "retracing" in text for text in said) == 3


async def test_the_learner_agent(fleet):
    job = await Job(fleet).submit()
    ranks = fleet.processes("rank")
    fleet.kill("learner")
    for rank in ranks:
        rank.wait(10)  # they end with it
    fleet.restart("learner")
    await job.finish()
    assert (await fleet.client.job(job.id)).attempt == 2


async def test_reward_service_coordinator_and_redis(fleet):
    job = await Job(fleet).submit()
    fleet.kill("reward")
    fleet.restart("reward")  # on another port: the nodes hear of it from the coordinator
    await fleet.seen_step(job.id, await fleet.step(job.id) + 4)
    fleet.kill("coordinator")
    await fleet.seen_step(job.id, await fleet.step(job.id) + 3)  # not in the way of the data
    fleet.restart("coordinator")
    ledger = fleet.ledger(job.id)
    before = await ledger.counts()
    fleet.kill("redis")
    fleet.restart("redis")
    after = await patiently(ledger.counts)
    assert after.step >= before.step and after.issued_total >= before.issued_total
    found = await job.finish()
    assert found.counts.reasons == {}  # nothing was filtered for want of a score
    assert (await fleet.client.job(job.id)).attempt == 1
