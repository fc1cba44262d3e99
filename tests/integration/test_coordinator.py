"""The coordinator as it runs: its own process, a real Redis, real gRPC and HTTP."""

import asyncio
import json

import pytest

from headway.errors import Conflict, NoCapacity
from headway.jobspec import parse_job
from headway.journal import Journal
from tests.support.coordinator import kinds, small_fleet
from tests.support.fleet import (
    SPEC,
    collect,
    eventually,
)


async def test_the_metrics_count_nodes_jobs_and_events(http, client, nodes):
    before = await gauges(http)
    await nodes("rollout", "r1")
    await nodes("rollout", "r2")
    await client.submit(SPEC, "j", queue=True)

    async def counted():
        now = await gauges(http)
        return now['headway_jobs{state="queued"}'] == 1 and now

    now = await eventually(counted)
    assert now['headway_fleet_nodes{role="rollout"}'] == 2
    assert now["headway_coordinator_redis_up"] == 1
    name = 'headway_job_events_total{kind="submitted"}'
    assert now[name] == before.get(name, 0) + 1


async def gauges(http):
    lines = (await http.get("/metrics")).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("headway_"))
    return {name: float(value) for name, value in pairs}


# -- a job's life ----------------------------------------------------------------------


async def test_the_whole_life_of_a_job(client, nodes, redis):
    learner, rollout, _ = await small_fleet(nodes)
    job = await client.submit(SPEC)
    assert job.job_id.startswith("sum-") and len(job.job_id) == len("sum-") + 6
    followed = asyncio.create_task(collect(client.follow(job.job_id)))

    work = await learner.work(job.job_id)
    assert parse_job(json.loads(work.spec_json)) == parse_job(SPEC)
    assert (work.attempt, work.cancel, list(work.reward_addresses)) == (
        1,
        False,
        ["127.0.0.1:1002"],
    )
    assert (await rollout.work(job.job_id)).spec_json == work.spec_json
    starting = await client.job(job.job_id)
    assert (starting.state, starting.learner, starting.rollouts) == ("starting", "l1", ("r1",))

    rollout.say(job.job_id, "running")
    learner.say(job.job_id, "running", version=0, run_dir="/runs/x")
    await learner.beat()
    running = await client.job(job.job_id)
    assert (running.state, running.run_dir) == ("running", "/runs/x")

    late = await nodes("rollout", "r2")
    await late.work(job.job_id)
    await late.leave()

    journal = Journal(redis, job.job_id)
    for step in range(3):
        await journal.append_metrics(step, {"critic/rewards/mean": 0.1 * step})
    learner.say(job.job_id, "running", version=2)
    await learner.beat()
    assert (await client.job(job.job_id)).step == 2

    learner.say(job.job_id, "succeeded", version=3)
    await learner.beat()
    done = await client.job(job.job_id)
    assert (done.state, done.step, done.total_steps, done.error) == ("succeeded", 3, 3, None)
    assert done.created_at <= done.started_at <= done.ended_at
    await learner.no_work()
    await rollout.no_work()

    updates = await asyncio.wait_for(followed, 20)
    assert [u.row["kind"] for u in updates if u.kind == "event"] == [
        "submitted", "assigned", "starting", "running", "member_joined", "member_lost", "succeeded",
    ]  # fmt: skip
    assert [u.row["step"] for u in updates if u.kind == "metrics"] == [0, 1, 2]


async def test_a_failed_job_says_why(client, nodes):
    learner, *_ = await small_fleet(nodes)
    job = await client.submit(SPEC)
    await learner.work(job.job_id)
    learner.say(job.job_id, "failed", error_kind="diverged", detail="loss is NaN at step 2")
    await learner.beat()
    failed = await client.job(job.job_id)
    assert (failed.state, failed.error.kind) == ("failed", "diverged")
    last = (await client.events(job.job_id)).rows[-1]
    assert (last["kind"], last["error_kind"]) == ("failed", "diverged")
    assert "loss is NaN at step 2" in last["message"]


async def test_a_job_that_the_fleet_cannot_run_is_refused_unless_it_may_queue(client, nodes):
    with pytest.raises(NoCapacity, match=r"a learner and 2 rollout nodes .*and a reward service"):
        await client.submit({**SPEC, "rollout": {"min_nodes": 2}})
    job = await client.submit(SPEC, "early", queue=True)
    waiting = await eventually(lambda: waits(client, "early"))
    assert "a free learner" in waiting.waiting_for
    learner, *_ = await small_fleet(nodes)
    await learner.work(job.job_id)
    second = await client.submit(SPEC, "second")  # busy is not missing: it queues
    assert second.state == "queued"
    learner.say("early", "succeeded", version=3)
    await learner.work("second")


async def waits(client, job_id):
    record = await client.job(job_id)
    return record if record.waiting_for else None


async def test_a_learner_restarted_under_its_name_gets_the_job_as_a_new_attempt(client, nodes):
    learner, *_ = await small_fleet(nodes)
    await client.submit(SPEC, "j")
    await learner.work("j")
    reborn = await nodes("learner", "l1", pid=2)
    assert (await reborn.work("j")).attempt == 2


# -- cancelling ------------------------------------------------------------------------


async def test_cancel_while_queued_running_and_ended(client, nodes):
    queued = await client.submit(SPEC, "q", queue=True)
    assert queued.state == "queued"
    assert (await client.cancel("q")).state == "cancelled"
    assert (await client.cancel("q")).state == "cancelled"

    learner, rollout, _ = await small_fleet(nodes)
    await client.submit(SPEC, "r")
    await learner.work("r")
    await rollout.work("r")
    learner.say("r", "running", version=0)
    rollout.say("r", "running")
    await learner.beat()
    assert (await client.cancel("r")).state == "cancelling"
    assert (await client.cancel("r")).state == "cancelling"

    async def told():
        work = await learner.beat()
        return work["r"].cancel

    await eventually(told)
    learner.say("r", "cancelled", version=1)
    await learner.beat()
    assert (await client.job("r")).state == "cancelled"
    await rollout.no_work()
    assert (await kinds(client, "r"))[-2:] == ["cancelling", "cancelled"]

    await client.submit(SPEC, "s")
    await learner.work("s")
    learner.say("s", "succeeded", version=3)
    await learner.beat()
    with pytest.raises(Conflict, match="succeeded"):
        await client.cancel("s")


async def test_ten_cancels_at_once_make_one_change(client, nodes):
    learner, *_ = await small_fleet(nodes)
    await client.submit(SPEC, "j")
    await learner.work("j")
    learner.say("j", "running")
    await learner.beat()
    records = await asyncio.gather(*(client.cancel("j") for _ in range(10)))
    assert {r.state for r in records} == {"cancelling"}
    assert (await kinds(client, "j")).count("cancelling") == 1
