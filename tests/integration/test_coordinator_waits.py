"""Who waits for whom, through REST and `headway doctor`, with scripted nodes and a real ledger."""

import asyncio
import json
import os
import signal

import pytest

from headway.cli import run_command
from headway.client import AsyncHeadwayClient
from headway.errors import NotFound
from headway.journal import Journal
from headway.ledger.api import LedgerConfig
from headway.ledger.redis_ledger import RedisLedger
from headway.pb import fleet_pb2
from headway.valkey import EmbeddedValkey
from tests.support.coordinator import small_fleet
from tests.support.fleet import SPEC, CoordinatorProcess, ScriptedNode, eventually
from tests.support.ledgers import tickets


@pytest.fixture
def doctor(coordinator, capfd):
    """Runs the command; (exit code, what it printed)."""

    async def run(job_id, *flags, url=coordinator.url):
        code = await asyncio.to_thread(run_command, ["doctor", job_id, "--url", url, *flags])
        return code, "".join(capfd.readouterr())

    return run


async def test_a_queued_job_says_what_it_lacks(client, doctor):
    await client.submit(SPEC, "j", queue=True)
    await eventually(lambda: waits(client, "j"))
    code, text = await doctor("j")
    assert code == 1
    assert "STUCK  job j is queued and waits for a free learner" in text


async def waits(client, job_id):
    record = await client.job(job_id)
    return record if record.waiting_for else None


async def test_the_doctor_names_the_ticket_the_node_and_who_else_waits(
    client, nodes, redis, doctor
):
    learner, rollout, reward = await small_fleet(nodes)
    await client.submit(SPEC, "j")
    await learner.work("j")
    await rollout.work("j")
    ledger = RedisLedger(redis, "j")
    await ledger.open(LedgerConfig(batch_groups=1, max_policy_lag=0))
    await ledger.issue(tickets(0, 2))
    await ledger.claim("r1", 0)
    await Journal(redis, "j").append_event(
        "member_lost", "node r9 is left out: digest", node_id="r9"
    )
    learner.say("j", "running", version=0, detail="step 1 waits")
    rollout.say("j", "running", version=0)
    wait = fleet_pb2.Wait(job_id="j", reason="groups", detail="step 1 waits", waited_s=93.0)
    learner.waits = [wait, fleet_pb2.Wait(reason="of another version", waited_s=1e9)]
    rollout.waits = [
        fleet_pb2.Wait(job_id="j", reason="scores", detail="2 tickets", waited_s=float("nan"))
    ]
    reward.waits = [fleet_pb2.Wait(job_id="j", reason="queue", detail="9 items", waited_s=20.0)]
    for node in (learner, rollout, reward):
        await node.beat()

    code, text = await doctor("j")
    assert code == 1
    step = "STUCK  step 1 waits for ticket 0 on node r1, 0 s, started at version 0 (it waits 93 s;"
    for line in (step, "waits  reward s1: 9 items  [20 s]", "waits  rollout r1: 2 tickets"):
        assert line in text
    assert "node r9 is left out" in text.partition("last events:")[2]
    assert "left out" not in text.partition("last events:")[0]  # it is no member any more
    code, text = await doctor("j", "--limit", "100", "--json")
    assert code == 0
    seen = json.loads(text)
    assert seen["healthy"] and seen["limit_s"] == 100
    assert [node["node_id"] for node in seen["job"]["nodes"]] == ["l1", "r1", "s1"]
    [lease] = seen["job"]["ledger"]["leases"]
    assert (lease["ticket_id"], lease["node_id"], lease["start_version"]) == (0, "r1", 0)
    assert seen["job"]["ledger"]["step"] == 0 and seen["job"]["store"]["used_bytes"] > 0
    fleet = await client.fleet()
    assert [w["reason"] for w in fleet["nodes"][0]["waits"]] == ["groups"]


async def test_wrong_names_and_an_absent_coordinator(client, doctor):
    with pytest.raises(NotFound):
        await client.waits("none")
    assert (await doctor("none"))[0] == 2
    code, text = await doctor("j", url="http://127.0.0.1:1")
    assert code == 3 and "no coordinator answers at http://127.0.0.1:1" in text


@pytest.mark.parametrize("how", ["ended", "hung"])
async def test_with_redis_away_it_answers_from_memory(tmp_path, how):
    with EmbeddedValkey(tmp_path) as server:
        process = CoordinatorProcess(server.url, "--heartbeat-s", "0.2", "--lost-after-s", "60")
        made = [
            ScriptedNode(process.grpc_address, *who)
            for who in (("l1", "learner"), ("r1", "rollout"), ("s1", "reward"))
        ]
        try:
            async with AsyncHeadwayClient(process.url) as client:
                for node in made:
                    await node.register()
                await client.submit(SPEC, "j")
                await made[0].work("j")
                await eventually(lambda: healthy_or_not(client, "j", True))
                if how == "ended":
                    server.kill()
                else:
                    os.kill(server.pid, signal.SIGSTOP)
                seen = await eventually(lambda: healthy_or_not(client, "j", False))
                assert seen["findings"][0]["who"] == "redis"
                assert "cannot be used" in seen["findings"][0]["text"]
                assert (seen["job"]["learner"], seen["job"]["ledger"]) == ("l1", None)
        finally:
            server.kill()
            process.kill()
            for node in made:
                await node.close()


async def healthy_or_not(client, job_id, healthy):
    seen = await client.waits(job_id)
    return seen if seen["healthy"] is healthy else None
