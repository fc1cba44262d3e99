"""Validation while training goes on, on a fleet of real processes (sim engines, sim trainer)."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
import pytest_asyncio

from headway.evaluation.records import PromptRecord, read_records, samples_path
from headway.jobspec import JobSpec, parse_job
from tests.support.accounts import accounts
from tests.support.sim_fleet import FleetShape, SimFleet, eventually, sim_job

pytestmark = pytest.mark.asyncio(loop_scope="module")
STEPS, BATCH, LAG, PROMPTS, N = 7, 4, 2, 12, 2
DUE = (0, 3, 6, 7)
_NUMBERS = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    shape = FleetShape(nodes=2, broadcast=2, step_s=0.05, weight_mib=1.0, tokens_per_s=60.0)
    async with SimFleet(folder, shape) as running:
        yield running


class Job:
    def __init__(self, fleet: SimFleet) -> None:
        self.fleet = fleet
        self.id = f"job-{next(_NUMBERS)}"
        self.folder = fleet.runs / self.id

    def spec(self, lag: int = LAG, steps: int = STEPS, **evaluation: Any) -> dict[str, Any]:
        held_out = self.fleet.folder / "held-out.jsonl"
        rows = [{"prompt": f"held out {i}?", "answer": str(i)} for i in range(PROMPTS)]
        held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        job = sim_job(
            self.fleet.folder / "data.jsonl",
            algorithm__max_policy_lag=lag,
            trainer__total_training_steps=steps,
            trainer__save_freq=2,
            rollout__max_num_seqs=4,
        )
        job["evaluation"] = {
            "data": [{"source": "jsonl", "name": str(held_out), "data_source": "sums"}],
            "n": N,
            "temperature": 1.0,
            "max_tokens": 128,
            "test_freq": 3,
            **evaluation,
        }
        return job

    async def submit(self, **changes: Any) -> Job:
        job = self.spec(**changes)
        self.parsed: JobSpec = parse_job(job)
        await self.fleet.submit(job, self.id)
        return self

    def records(self) -> list[PromptRecord]:
        return list(read_records(samples_path(self.folder)))

    async def validating(self, version: int, at_least: int = 1) -> None:
        """Returns while a version's validation is under way."""

        async def look() -> bool:
            found = sum(record.version == version for record in self.records())
            return found >= at_least

        await eventually(look)
        assert self.rows(version) == []

    def rows(self, version: int) -> list[dict[str, Any]]:
        """The validation rows of a version."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if row["step"] == row["version"] == version]

    async def finish(self) -> None:
        """It succeeded; every version that was due has every prompt once; training's accounts."""
        record = await self.fleet.ended(self.id)
        assert record.state == "succeeded", record.error
        spec = self.parsed
        steps, lag = spec.trainer.total_training_steps, spec.algorithm.max_policy_lag
        due = [version for version in range(steps + 1) if spec.validates(version)]
        asked = Counter((r.version, r.index) for r in self.records())
        assert asked == Counter(itertools.product(due, range(PROMPTS)))
        assert samples_path(self.folder).read_text().count("\n") == len(due) * PROMPTS
        for r in self.records():
            assert (r.skipped, len(r.completions)) == ("", N)
        for version in due:
            (row,) = self.rows(version)
            rewards = [c.reward for r in self.records() if r.version == version
                       for c in r.completions]  # fmt: skip
            mean = sum(rewards) / len(rewards)
            assert row[f"val-core/sums/reward/mean@{N}"] == pytest.approx(mean)
            ledger = await self.fleet.redis.hgetall(f"hw:{{{self.id}}}:val-{version}:meta")
            assert int(ledger[b"consumed"]) == PROMPTS and b"closed" in ledger
            assert await self.fleet.redis.ttl(f"hw:{{{self.id}}}:val-{version}:meta") > 0
        events = await self.fleet.events(self.id)
        assert not [e for e in events if e["kind"] in ("evaluation_mixed", "validation_lost")]
        found = await accounts(self.fleet.redis, self.id, self.folder)
        found.check(steps, BATCH, lag)


@pytest.fixture
def job(fleet) -> Job:
    return Job(fleet)


async def test_every_due_version_is_validated_once_and_training_is_as_without(fleet, job):
    await (await job.submit()).finish()
    published = {
        e["version"] for e in await fleet.events(job.id) if e["kind"] == "weights_published"
    }
    assert set(DUE) <= published  # and perhaps not every version between them
    # prompts have seeds of their own: versions differ by their weights alone (here: not at all)
    by_version = {v: {r.index: r.completions for r in job.records() if r.version == v} for v in DUE}
    assert all(by_version[v] == by_version[0] for v in DUE)


async def test_on_policy_with_a_validation_at_every_step(job):
    await (await job.submit(lag=0, steps=4, test_freq=1)).finish()


@pytest.mark.parametrize("name", ["rank", "rollout-0", "redis"])
async def test_killed_in_the_middle_of_a_validation(fleet, job, name):
    await job.submit()
    await job.validating(3)
    fleet.kill(name)
    if name != "rank":
        fleet.restart(name)
    await job.finish()


async def test_all_nodes_killed_in_the_middle_of_a_validation(fleet, job):
    await job.submit()
    await job.validating(3)
    for name in ("rollout-0", "rollout-1"):
        fleet.kill(name)
    for name in ("rollout-0", "rollout-1"):
        fleet.restart(name)
    await job.finish()


async def test_the_learner_and_all_nodes_killed_in_the_last_validation(fleet, job):
    await job.submit()
    await job.validating(STEPS)
    for name in ("rank", "rollout-0", "rollout-1"):
        fleet.kill(name)
    for name in ("rollout-0", "rollout-1"):
        fleet.restart(name)
    await job.finish()


async def test_cancelled_in_the_middle_of_a_validation(fleet, job):
    await job.submit()
    await job.validating(3)
    await fleet.client.cancel(job.id)
    assert (await fleet.ended(job.id)).state == "cancelled"
    ledger = await fleet.redis.hgetall(f"hw:{{{job.id}}}:val-3:meta")
    assert b"closed" in ledger
