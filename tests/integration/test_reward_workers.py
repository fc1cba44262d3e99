"""Graders that hang, crash, hog or are killed, and the turns that jobs take at the workers."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import grpc
import httpx
import psutil
import pytest

from headway.errors import NoCapacity, Unavailable
from headway.messages import ScoreItem
from headway.pb import reward_pb2, reward_pb2_grpc
from headway.reward_client import RewardClient
from headway.rpc import channel
from services.reward.request import ServiceLimits
from services.reward.workers import PoolSettings
from tests.support.reward_stand import GOOD, QUICKSTART, ROOT, items, service, until


async def test_a_catastrophic_pattern_is_killed_by_the_limit():
    spec = {"type": "regex", "pattern": "^(a+)+$", "timeout_s": 1.5}
    texts = ["aaa", "a" * 60 + "b", "aaaa", "a" * 60 + "c", "b"]
    async with service() as (_, client):
        scores = await client.score("", "", spec, [ScoreItem(None, t, {}) for t in texts], 5.0)
    assert [s.reward for s in scores] == [1.0, None, 1.0, None, 0.0]
    assert [s.error_kind for s in scores] == ["", "timeout", "", "timeout", ""]
    assert "1.5 s" in scores[1].error_message
    assert scores[1].duration_s >= 1.5


async def test_hang_crash_hog_and_raise_leave_the_other_items_right(hostile):
    dos = [{}, {"do": "hang"}, {}, {"do": "exit"}, {}, {"do": "hog"}, {}, {"do": "raise"}, {},
           {"do": "system_exit"}, {}, {"do": "print"}, {}]  # fmt: skip
    spec = {"type": "hostile"}
    async with service(hostile) as (server, client):
        scores = await client.score("", "", spec, items(*dos), 2.0)
        kinds = {i: s.error_kind for i, s in enumerate(scores) if s.error_kind}
        assert kinds == {1: "timeout", 3: "crash", 5: "memory", 7: "internal", 9: "internal"}
        assert all((s.reward is None) == (i in kinds) for i, s in enumerate(scores))
        assert {s.reward for i, s in enumerate(scores) if i not in kinds} == {1.0}
        assert scores[7].error_message == "hostile: ValueError: no mood for it"
        assert server.pool.num_ready == 1


async def test_s047_rewards_that_are_no_finite_number_name_their_grader(hostile):
    dos = [{"do": "give", "value": v} for v in ("nan", "none", "list", "huge")]
    async with service(hostile) as (_, client):
        scores = await client.score("", "", {"type": "hostile"}, items(*dos, {}), 5.0)
        assert [s.reward for s in scores] == [None, None, None, None, 1.0]
        assert [s.error_kind for s in scores] == ["internal"] * 4 + [""]
        assert scores[1].error_message == "the hostile grader gave NoneType, not a number"
        parts = {"type": "sum", "graders": {"odd": {"type": "hostile"}}}
        (null,) = await client.score("", "", parts, items(dos[0]), 5.0)
        assert null.reward is None
        assert null.error_message == "odd: a hostile grader gave nan, not a finite number"


async def test_a_worker_killed_from_outside_costs_no_score(hostile, tmp_path):
    dos = [{}, {"do": "killed_once", "marker": str(tmp_path / "killed")}, {}]
    async with service(hostile) as (server, client):
        (before,) = server.pool.pids
        scores = await client.score("", "", {"type": "hostile"}, items(*dos), 10.0)
        assert [s.reward for s in scores] == [1.0, 1.0, 1.0]
        assert int((tmp_path / "killed").read_text()) == before
        # And one killed while idle is replaced before the next batch.
        (idle,) = server.pool.pids
        os.kill(idle, signal.SIGKILL)
        (again,) = await client.score("", "", {"type": "hostile"}, items({}), 10.0)
        assert again.reward == 1.0
        assert server.pool.pids != (idle,)


async def test_a_full_queue_refuses_and_the_client_waits_for_room(hostile, tmp_path):
    gate = tmp_path / "gate"
    spec = {"type": "hostile", "log": str(tmp_path / "log")}
    slow = items({"do": "wait_for", "file": str(gate)})
    async with service(hostile, ServiceLimits(max_queued_items=2)) as (server, client):
        running = asyncio.create_task(client.score("", "a", spec, slow, 60.0))
        await until((tmp_path / "log").exists)
        with pytest.raises(NoCapacity, match="1 items wait for a grader worker"):
            await client.score("", "b", spec, items({}, {}), 60.0)
        body = {"grader": spec, "items": [{"completion": "x"}] * 2}
        async with httpx.AsyncClient() as http:
            full = await http.post(server.http_address + "/v1/score", json=body)
        assert full.status_code == 429
        assert full.json()["error"]["kind"] == "too_many"
        patient = RewardClient([server.address], patience_s=60.0)
        waiting = asyncio.create_task(patient.score("w", "b", spec, items({}, {}), 60.0))
        await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done()
        gate.touch()
        assert [s.reward for s in await waiting] == [1.0, 1.0]
        assert (await running)[0].reward == 1.0
        await patient.close()


async def test_jobs_take_turns(hostile, tmp_path):
    log, gate = tmp_path / "log", tmp_path / "gate"
    spec = {"type": "hostile", "log": str(log)}
    many = [ScoreItem(None, f"big{i}", {}) for i in range(256)]
    blocker = [ScoreItem(None, "first", {"do": "wait_for", "file": str(gate)})]
    async with service(hostile) as (server, client):
        held = asyncio.create_task(client.score("", "x", spec, blocker, 30.0))
        await until(log.exists)
        big = asyncio.create_task(client.score("", "big", spec, many, 30.0))
        await until(lambda: len(server.scorer._running) == 2)
        small = asyncio.create_task(
            client.score("", "small", spec, [ScoreItem(None, "small", {})], 30.0)
        )
        await until(lambda: len(server.scorer._running) == 3)
        gate.touch()
        await asyncio.gather(held, big, small)
    # One piece of the big job goes first, short since nothing is known of it; the small one is
    # next, not last.
    assert log.read_text().splitlines().index("small") == 1 + 8


async def test_ten_thousand_items_delay_a_small_request_by_one_turn(hostile, tmp_path):
    log, gate = tmp_path / "log", tmp_path / "gate"
    spec = {"type": "hostile", "log": str(log)}
    many = [ScoreItem(None, f"big{i}", {}) for i in range(2500)]
    many[100] = ScoreItem(None, "big100", {"do": "wait_for", "file": str(gate)})
    async with service(hostile) as (server, client):
        big = [asyncio.create_task(client.score("", "big", spec, many, 30.0)) for _ in range(4)]
        await until(lambda: log.exists() and len(log.read_text().splitlines()) > 100)
        small = client.score("", "small", spec, [ScoreItem(None, "small", {})] * 8, 30.0)
        scoring = asyncio.create_task(small)
        await until(lambda: len(server.scorer._running) == 5)
        before = len(log.read_text().splitlines())
        gate.touch()
        assert [s.reward for s in await scoring] == [1.0] * 8
        order = log.read_text().splitlines()
        assert sum(map(len, await asyncio.gather(*big))) == 10_000
    # What the worker holds ends first, the big job may have had its next turn, then it is the
    # small one's.
    assert order.index("small") - before <= 2 * 64
    assert [line for line in order[order.index("small") :][:8]] == ["small"] * 8


async def test_slow_items_are_given_out_one_by_one(hostile, tmp_path):
    """A batch of slow items is no longer in time than a batch of quick ones."""
    log = tmp_path / "log"
    spec = {"type": "hostile", "log": str(log)}
    slow = [ScoreItem(None, f"slow{i}", {"do": "nap"}) for i in range(40)]
    async with service(hostile) as (server, client):
        big = asyncio.create_task(client.score("", "slow", spec, slow, 30.0))
        await until(lambda: log.exists() and len(log.read_text().splitlines()) > 12)
        small = [ScoreItem(None, "small", {})]
        await client.score("", "small", spec, small, 30.0)
        order = log.read_text().splitlines()
        assert [s.reward for s in await big] == [1.0] * 40
        assert server.pool._pace.num_items("slow", "hostile") < 8
    assert order.index("small") < 12 + 10


async def test_work_that_nobody_waits_for_is_dropped(hostile, tmp_path):
    log, gate = tmp_path / "log", tmp_path / "gate"
    spec = {"type": "hostile", "log": str(log)}
    dos = [{"do": "wait_for", "file": str(gate)}] + [{}] * 255
    request = reward_pb2.ScoreRequest(request_id="gone", grader_json=json.dumps(spec))
    for do in dos:
        request.items.add(completion="x", item_json=json.dumps(do))
    async with service(hostile) as (server, client), channel(server.address) as link:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await reward_pb2_grpc.RewardServiceStub(link).Score(request, timeout=0.5)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not server.scorer._running)
        gate.touch()
        (after,) = await client.score("", "", spec, items({}), 30.0)
        assert after.reward == 1.0
        # The batch that had begun may go on until its worker is killed; no other begins.
        assert len(log.read_text().splitlines()) <= 64 + 1


async def test_reasoning_gym_and_several_workers():
    entry = {"answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    spec = {"type": "reasoning_gym", "strict": True, "timeout_s": 20}
    samples = [ScoreItem(None, str(i % 5), entry) for i in range(40)]
    async with service(PoolSettings(num_workers=2)) as (_, client):
        scores = await client.score("", "", spec, samples, 5.0)
    assert [s.reward for s in scores] == [float(i % 5 == 3) for i in range(40)]


async def test_workers_are_recycled():
    async with service(PoolSettings(num_workers=1, items_per_worker=20)) as (server, client):
        (before,) = server.pool.pids
        scores = await client.score("", "", QUICKSTART, [GOOD] * 64, 5.0)
        assert [s.reward for s in scores] == [1.0] * 64
        assert before not in server.pool.pids


async def test_workers_that_cannot_start_stop_the_service_with_a_reason():
    with pytest.raises(Unavailable, match="no grader worker came up"):
        async with service(PoolSettings(num_workers=1, imports=("no_such_module",))):
            pass


def test_the_process_parses_first_and_leaves_no_worker_behind():
    command = [sys.executable, "-m", "services.reward", "--workers", "2"]
    bad = subprocess.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "not a loopback address" in bad.stderr
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        row = next(json.loads(line) for line in process.stderr if "http_address" in line)
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        assert "torch" not in " ".join(m.path for m in psutil.Process(process.pid).memory_maps())
        body = {"grader": QUICKSTART, "items": [{"completion": "3", "item": {"answer": 3}}]}
        answer = httpx.post(row["http_address"] + "/v1/score", json=body, timeout=20)
        assert answer.json()["results"][0]["reward"] == 1.0
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert psutil.wait_procs(workers, timeout=10)[1] == []
    finally:
        process.kill()
        process.stderr.close()


def test_workers_die_with_a_killed_service():
    command = [sys.executable, "-m", "services.reward", "--workers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        next(line for line in process.stderr if "http_address" in line)
        workers = psutil.Process(process.pid).children()
        process.kill()
        process.wait(timeout=10)
        assert len(workers) == 1
        assert psutil.wait_procs(workers, timeout=10)[1] == []
    finally:
        process.kill()
        process.stderr.close()
