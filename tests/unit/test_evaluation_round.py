"""One evaluation: the learner's round and rollout nodes over an in-memory ledger, sim engines."""

import asyncio
from collections import Counter

import pytest

from headway.errors import JobFailed
from headway.evaluation.data import Asked
from headway.evaluation.records import read_records
from headway.jobspec import parse_job
from headway.ledger.memory import MemoryLedger
from headway.lifecycle import end_tasks
from headway.messages import Score, Ticket, WeightManifest
from services.learner.events import Events
from services.learner.held_out import Prompts
from services.learner.parts import ledger_config
from services.learner.round import GIVEN_UP, Round
from services.rollout.presence import WorkerSettings
from services.rollout.sim_engine import Lengths, SimEngine, SimSettings
from services.rollout.worker import JobRunner
from tests.support.rollout_stand import EventList, Graders

NUM, N, VERSION = 30, 2, 3


def spec(**reward):
    return parse_job(
        {
            "model": {"path": "/nowhere"},
            "data": {"source": "reasoning_gym", "name": "chain_sum", "train_batch_size": 2},
            "reward": {"grader": {"type": "string_check", "operation": "eq"}, **reward},
            "algorithm": {"max_policy_lag": 1},
            "rollout": {"n": 4, "max_num_seqs": 8, "lease_s": 1.0, "max_tokens": 50},
            "evaluation": {
                "data": [{"source": "reasoning_gym", "name": "chain_sum"}],
                "n": N,
                "temperature": 1.0,
                "test_freq": VERSION,
                "max_tokens": 30,
            },
            "trainer": {"total_training_steps": 9},
        }
    )


def prompts(num=NUM, too_long=()):
    asked = tuple(Asked("sums", i, f"question {i}", {"answer": str(i)}, {}) for i in range(num))
    tickets = tuple(
        Ticket(i, (1, 2, i), a.prompt, a.item, N, 100 + i, 0) for i, a in enumerate(asked)
    )
    return Prompts(tickets, asked, too_long)


class Stand:
    """A round, and nodes of a training job that have nothing but the validation to do."""

    def __init__(self, folder, job=None, asked=None, rule=lambda item, call: Score(1.0)):
        self.job, self.prompts = job or spec(), asked or prompts()
        self.main, self.ledger = MemoryLedger(), MemoryLedger()
        self.path = folder / "samples.jsonl"
        self.events = Events(None)
        self.graders, self.node_events = Graders(rule), EventList()
        self.tasks = []

    def round(self):
        return Round(self.job, self.ledger, self.prompts, VERSION, self.path, self.events)

    def node(self, name, engine):
        def room(room):
            return self.ledger if room == f"val-{VERSION}" else MemoryLedger()

        settings = WorkerSettings(name, f"{name}:1")
        runner = JobRunner("job", self.job, settings, engine, self.main, self.graders,
                           self.node_events, room)  # fmt: skip
        self.tasks.append(asyncio.create_task(runner.run()))
        return runner

    async def add(self, name, version=VERSION, rate=20_000.0, engine=None):
        if not self.tasks:
            await self.main.open(ledger_config(self.job))
            self.main._state().next_take = self.main._state().next_commit = 9  # steps were trained
        engine = engine or SimEngine(SimSettings(tokens_per_s=rate, lengths=Lengths("uniform", 10)))
        await engine.start()
        runner = self.node(name, engine)
        await install(runner, engine, version)
        return runner, engine

    def records(self):
        return list(read_records(self.path))

    async def recorded(self, count):
        async with asyncio.timeout(60):
            while len(self.records()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def finish(self, round_):
        try:
            async with asyncio.timeout(60):
                await round_.run()
        finally:
            await end_tasks(self.tasks)
        records = self.records()
        assert Counter(r.index for r in records) == Counter(range(NUM))
        assert self.path.read_text().count("\n") == NUM
        counts = await self.ledger.counts()
        assert counts.conserved and counts.held_bytes == 0
        assert (await self.main.counts()).issued_total == 0
        return records


async def install(runner, engine, version):
    report = await engine.install(WeightManifest(version, (), 0), 5.0)
    runner.installed(report.version)


async def test_every_prompt_is_recorded_once_at_its_version(tmp_path):
    stand = Stand(tmp_path)
    round_ = stand.round()
    await round_.open()
    for name in ("a", "b"):
        await stand.add(name)
    for record in await stand.finish(round_):
        assert (record.version, record.skipped, len(record.completions)) == (VERSION, "", N)
        assert all(c.num_tokens <= 19 and c.reward == 1.0 for c in record.completions)


async def test_nodes_at_other_versions_take_none_of_it(tmp_path):
    stand = Stand(tmp_path)
    round_ = stand.round()
    await round_.open()
    await stand.add("old", version=VERSION - 1)
    await stand.add("due-too", version=9)
    running = asyncio.create_task(round_.run())
    await asyncio.sleep(0.2)
    assert (await stand.ledger.counts()).issued == NUM
    await end_tasks([running])
    await stand.add("a")
    again = stand.round()
    await again.open()
    assert len(await stand.finish(again)) == NUM


async def test_a_group_of_two_versions_is_asked_again(tmp_path):
    stand = Stand(tmp_path)
    round_ = stand.round()
    await round_.open()
    runner, engine = await stand.add("a", rate=50.0)
    await asyncio.sleep(0.1)
    await install(runner, engine, VERSION + 1)  # as no learner of ours would
    await stand.add("b")
    await stand.finish(round_)
    assert (await stand.ledger.counts()).failed_attempts > 0
    assert not [r for r in stand.records() if r.skipped]


async def test_a_node_that_vanishes_costs_a_lease(tmp_path):
    stand = Stand(tmp_path)
    round_ = stand.round()
    await round_.open()
    await stand.add("a", rate=1.0)  # takes some and is never heard of again
    await asyncio.sleep(0.05)
    for task in asyncio.all_tasks():
        if task.get_name() == "renew":
            task.cancel()
    await stand.add("b")
    await stand.finish(round_)
    assert (await stand.ledger.counts()).expired_leases > 0


async def test_a_learner_that_is_started_again_goes_on(tmp_path):
    stand = Stand(tmp_path)
    await stand.add("a", rate=500.0)
    for count in (5, 12, 20):
        round_ = stand.round()
        await round_.open()
        running = asyncio.create_task(round_.run())
        await stand.recorded(count)
        await end_tasks([running])
    with stand.path.open("a") as file:
        file.write('{"torn')
    last = stand.round()
    await last.open()
    await stand.finish(last)


async def test_errors_of_graders_are_recorded_and_never_a_zero(tmp_path):
    def rule(item, call):
        return Score(None, {}, "timeout", "too slow") if item.item["answer"] == "7" else Score(0.5)

    stand = Stand(tmp_path, rule=rule)
    round_ = stand.round()
    await round_.open()
    await stand.add("a")
    for record in await stand.finish(round_):
        wanted = (None, "timeout") if record.index == 7 else (0.5, "")
        assert {(c.reward, c.error_kind) for c in record.completions} == {wanted}
    assert [row["kind"] for row in stand.node_events.rows] == ["reward_errors"]

    failing = Stand(tmp_path / "b", job=spec(on_error="fail"), rule=rule)
    round_ = failing.round()
    await round_.open()
    await failing.add("a")
    with pytest.raises(JobFailed, match="prompt 7 of sums could not be scored"):
        await failing.finish(round_)


@pytest.mark.parametrize("capacity", [8, 1])  # completions at once; a prompt has two
async def test_held_out_prompts_come_before_the_job_s_own(tmp_path, capacity):
    job = spec()
    rollout = job.rollout.model_copy(update={"max_num_seqs": capacity})
    stand = Stand(tmp_path, job=job.model_copy(update={"rollout": rollout}))
    await stand.main.open(ledger_config(stand.job))
    stand.main._state().next_take = stand.main._state().next_commit = VERSION
    await stand.main.issue([Ticket(i, (1, i), "own", {}, 4, i) for i in range(4)])
    round_ = stand.round()
    await round_.open()
    running = asyncio.create_task(round_.run())
    engine = SimEngine(SimSettings(tokens_per_s=500.0))
    await engine.start()
    await install(stand.node("a", engine), engine, VERSION)
    seen = []  # of the job's own, and of the prompts that are left
    async with asyncio.timeout(60):
        while (counts := await stand.main.counts()).delivered < 4:
            left = await stand.ledger.counts()
            seen.append((counts.issued, left.issued + left.leased))
            await asyncio.sleep(0.001)
        await running
    await end_tasks(stand.tasks)
    # none of the job's own was begun while a prompt was left that nobody held
    assert all(left <= 3 * max(1, capacity // N) for own, left in seen if own < 4)
    assert len(stand.records()) == NUM


class Choosy(SimEngine):
    async def generate(self, request_id, prompt_ids, n, sampling, seed):
        if seed == 104:
            raise RuntimeError("not this one")
        return await super().generate(request_id, prompt_ids, n, sampling, seed)


async def test_what_no_node_can_sample_is_recorded_as_skipped(tmp_path):
    too_long = ((Asked("long", 0, "x", {}, {}), 900),)
    stand = Stand(tmp_path, asked=prompts(too_long=too_long))
    round_ = stand.round()
    await round_.open()
    await stand.add("a", engine=Choosy(SimSettings(tokens_per_s=20_000.0)))
    async with asyncio.timeout(60):
        await round_.run()
    await end_tasks(stand.tasks)
    skipped = {(r.data_source, r.index): r.skipped for r in stand.records() if r.skipped}
    assert skipped == {("sums", 4): GIVEN_UP, ("long", 0): "a prompt of 900 tokens"}
    assert len(stand.records()) == NUM + 1
