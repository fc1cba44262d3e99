"""The learner agent: assignments in, training processes and statuses out."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headway.ledger.redis_ledger import RedisLedger
from headway.pb import fleet_pb2, learner_pb2
from headway.redis_client import connect
from services.learner.agent import AgentSettings, LearnerAgent
from services.learner.rpc import LearnerServicer
from tests.integration.test_learner_loop import job
from tests.support.scripted_node import ScriptedNode
from tests.support.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture
async def agent(valkey_url, tmp_path):
    running = LearnerAgent(AgentSettings(tmp_path, valkey_url, "127.0.0.1"), lambda: None)
    yield running
    await running.stop()


def assignment(job_id, spec, *, cancel=False, attempt=1):
    text = spec if isinstance(spec, str) else spec.canonical_json()
    return fleet_pb2.Assignment(job_id=job_id, spec_json=text, cancel=cancel, attempt=attempt)


def status(agent, job_id):
    return next(s for s in agent.statuses() if s.job_id == job_id)


async def until(holds):
    while not holds():  # noqa: ASYNC110 - other processes set no event of ours
        await asyncio.sleep(0.01)


async def test_one_job_at_a_time_from_assignment_to_end(agent, model, valkey_url, job_id, tmp_path):
    first, second = assignment(job_id, job(model)), assignment(f"{job_id}-b", job(model))
    redis = connect(valkey_url)
    async with ScriptedNode(RedisLedger(redis, job_id)).serving():
        await agent.reconcile([first, second])
        assert [s.job_id for s in agent.statuses()] == [job_id]  # the second waits its turn
        await until(lambda: status(agent, job_id).phase == "running")
        servicer = LearnerServicer(agent, "learner-1")
        answer = await servicer.GetLearnerStatus(learner_pb2.GetLearnerStatusRequest(), None)
        assert (answer.node_id, answer.job_id, answer.phase) == ("learner-1", job_id, "running")
        assert len(answer.rank_pids) == 1
        await until(lambda: status(agent, job_id).phase not in ("starting", "running"))
    done = status(agent, job_id)
    assert (done.phase, done.version, done.error_kind) == ("succeeded", 4, "")
    assert Path(done.run_dir) == tmp_path / job_id
    assert (tmp_path / job_id / "model" / "model.safetensors").exists()
    await agent.reconcile([first])  # told again: it is not trained again
    assert agent.current is None and status(agent, job_id).phase == "succeeded"
    await agent.reconcile([])
    assert agent.statuses() == []
    await redis.aclose()


@pytest.mark.parametrize(
    ("job_id", "spec", "kind"),
    [
        ("../../etc", "{}", "invalid"),
        ("broken", "{", "invalid"),
        ("misspelt", json.dumps({"modle": {}}), "invalid"),
    ],
)
async def test_what_cannot_be_started_fails_at_once_and_touches_nothing(
    agent, tmp_path, job_id, spec, kind
):
    await agent.reconcile([assignment(job_id, spec)])
    assert (status(agent, job_id).phase, status(agent, job_id).error_kind) == ("failed", kind)
    assert list(tmp_path.iterdir()) == []


async def test_cancelling_while_the_ranks_start(agent, model, job_id, tmp_path):
    await agent.reconcile([assignment(job_id, job(model))])
    (work,) = [agent.current]
    await until(lambda: work.ranks.pids)
    await agent.reconcile([assignment(job_id, job(model), cancel=True)])
    await until(lambda: status(agent, job_id).phase == "cancelled")
    assert (tmp_path / job_id / "job.yaml").exists()
    assert (tmp_path / job_id / "report.html").exists()


async def test_a_job_that_is_withdrawn_loses_its_ranks_but_not_its_ledger(
    agent, model, valkey_url, job_id
):
    redis = connect(valkey_url)
    ledger = RedisLedger(redis, job_id)
    async with ScriptedNode(ledger).serving():
        await agent.reconcile([assignment(job_id, job(model, steps=100_000))])
        await until(lambda: status(agent, job_id).phase == "running")
        work = agent.current
        (pid,) = work.ranks.pids
        await agent.reconcile([])
        await asyncio.gather(work.task, return_exceptions=True)
        assert not psutil.pid_exists(pid)
        step = (await ledger.counts()).step
        claim = await ledger.claim("other", step)  # still open for the next learner
        assert claim.refusal != "closed"
    await redis.aclose()


AGENT = """
import asyncio, sys
from pathlib import Path
from headway.pb import fleet_pb2
from services.learner.agent import AgentSettings, LearnerAgent
async def main():
    agent = LearnerAgent(AgentSettings(Path(sys.argv[1]), sys.argv[2], "127.0.0.1"), lambda: None)
    wanted = fleet_pb2.Assignment(job_id=sys.argv[3], spec_json=sys.argv[4], attempt=1)
    await agent.reconcile([wanted])
    while not agent.current.ranks.pids:
        await asyncio.sleep(0.01)
    print(*agent.current.ranks.pids, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_the_ranks_end_with_a_killed_agent(model, valkey_url, job_id, tmp_path):
    spec = job(model, ranks=2).canonical_json()
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path), valkey_url, job_id, spec],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as agent:
        ranks = [psutil.Process(int(pid)) for pid in agent.stdout.readline().split()]
        agent.kill()
        agent.wait()
    assert ranks
    gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert alive == [] and len(gone) == len(ranks)
