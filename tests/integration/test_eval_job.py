"""Eval jobs on a fleet of real processes (sim engines): every prompt once, whoever is killed."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headway.evaluation.records import PromptRecord, read_records, samples_path
from tests.support.sim_fleet import FleetShape, SimFleet, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS, N = 48, 2
_NUMBERS = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    shape = FleetShape(nodes=2, broadcast=2, weight_mib=1.0, lengths="uniform:20")
    async with SimFleet(folder, shape) as running:
        yield running


def eval_spec(folder: Path, more_rows: tuple[str, ...] = (), **rollout: Any) -> dict[str, Any]:
    """Two data sets of half the prompts each, the second with a grader that always says 1."""
    sets = []
    for name in ("odd", "even"):
        prompts = [*(f"{name} {i}?" for i in range(PROMPTS // 2)), *more_rows]
        rows = [{"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(prompts)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sets.append({"source": "jsonl", "name": str(folder / f"{name}.jsonl")})
    sets[0]["data_source"] = "odd"
    sets[1]["grader"] = {"type": "regex", "pattern": "", "match": "search"}
    return {
        "kind": "eval",
        "name": "eval",
        "model": {"path": "sim", "max_model_len": 320},
        "evaluation": {"data": sets, "n": N, "temperature": 1.0},
        "reward": {"grader": {"type": "regex", "pattern": "[0-4]$", "match": "search"}},
        "rollout": {"max_tokens": 256, "max_num_seqs": 8, "lease_s": 2.0, "update_timeout_s": 3.0,
                    **rollout},
    }  # fmt: skip


class Job:
    def __init__(self, fleet: SimFleet) -> None:
        self.fleet = fleet
        self.id = f"eval-{next(_NUMBERS)}"
        self.folder = fleet.runs / self.id

    async def submit(self, **rollout: Any) -> Job:
        await self.fleet.submit(eval_spec(self.fleet.folder, **rollout), self.id)
        return self

    def records(self) -> list[PromptRecord]:
        return list(read_records(samples_path(self.folder)))

    async def recorded(self, count: int) -> None:
        async def look() -> bool:
            return len(self.records()) >= count

        await eventually(look)

    async def finish(self) -> list[PromptRecord]:
        """The records of a job that succeeded: every prompt, once, whole."""
        record = await self.fleet.ended(self.id)
        assert record.state == "succeeded", record.error
        text = samples_path(self.folder).read_text()
        assert text.count("\n") == PROMPTS  # a line each: nothing was asked and thrown away
        records = self.records()
        asked = Counter((r.data_source, r.index) for r in records)
        names = ("odd", "even.jsonl")
        assert asked == Counter(itertools.product(names, range(PROMPTS // 2)))
        for r in records:
            assert (r.version, r.skipped, len(r.completions)) == (0, "", N)
            assert all(c.reward is not None and c.num_tokens > 0 for c in r.completions)
        counts = await self.fleet.ledger(self.id).counts()
        assert counts.conserved and counts.issued_total == counts.consumed == PROMPTS
        assert counts.held_bytes == 0
        return records


@pytest.fixture
def job(fleet) -> Job:
    return Job(fleet)


async def test_every_prompt_is_asked_once_and_scored_by_its_own_grader(job):
    records = await (await job.submit()).finish()
    assert {c.reward for r in records if r.data_source == "even.jsonl" for c in r.completions} == {
        1.0
    }
    odd = [c for r in records if r.data_source == "odd" for c in r.completions]
    assert {c.reward for c in odd} == {0.0, 1.0}
    for completion in odd:  # the grader of the job
        assert completion.reward == float(completion.text[-1:] in set("01234"))
    (row,) = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["version"]) == (0, 0)
    mean = sum(c.reward for c in odd) / len(odd)
    assert row[f"val-core/odd/reward/mean@{N}"] == pytest.approx(mean)
    assert row[f"val-core/even.jsonl/reward/mean@{N}"] == 1.0
    assert (job.folder / "eval" / "metrics.json").is_file()
    assert not list((job.folder / "checkpoints").iterdir()) and not (job.folder / "model").exists()


@pytest.mark.parametrize("name", ["rank", "rollout-0", "coordinator"])
async def test_killed_in_the_middle(fleet, job, name):
    await job.submit(max_num_seqs=4)
    await job.recorded(PROMPTS // 4)
    assert len(job.records()) < PROMPTS
    fleet.kill(name)
    if name != "rank":  # that one is started again by its agent
        fleet.restart(name)
    await job.finish()


async def test_killed_again_and_again_while_it_sums_up(fleet, job):
    await job.submit(max_num_seqs=4)
    for count in (4, 20, 36):
        await job.recorded(count)
        fleet.kill("rank")
    await job.finish()


async def test_a_prompt_without_room_is_recorded_as_skipped(fleet, job):
    spec = eval_spec(fleet.folder, more_rows=("x" * 100,))
    spec["evaluation"]["data"] = spec["evaluation"]["data"][:1]
    await fleet.submit(spec, job.id)
    assert (await fleet.ended(job.id)).state == "succeeded"
    (skipped,) = [r for r in job.records() if r.skipped]
    assert (skipped.index, skipped.skipped) == (PROMPTS // 2, "a prompt of 100 tokens")
    assert len(job.records()) == PROMPTS // 2 + 1


async def test_a_cancelled_job_stops_and_keeps_what_it_has(fleet, job):
    await job.submit(max_num_seqs=2)
    await job.recorded(4)
    await fleet.client.cancel(job.id)
    assert (await fleet.ended(job.id)).state == "cancelled"
    assert 4 <= len(job.records()) < PROMPTS
