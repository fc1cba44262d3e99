"""The reward service through both of its doors, with real worker processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from headway import graders
from headway.errors import Conflict, HeadwayError, InvalidSpec, NoCapacity, Unavailable
from headway.lifecycle import Lifecycle
from headway.messages import ScoreItem
from headway.pb import reward_pb2, reward_pb2_grpc
from headway.reward_client import RewardClient
from headway.rpc import channel, grpc_server
from services.reward.scoring import ServiceLimits
from services.reward.serve import reward_server
from services.reward.workers import PoolSettings
from tests.support.hostile_graders import Hostile

ROOT = Path(__file__).parents[2]
QUICKSTART = {
    "type": "sum",
    "graders": {
        "only_an_integer": {"type": "regex", "pattern": r"^\s*-?\d+\s*$"},
        "right": {"type": "numeric", "extract": "last"},
    },
    "weights": {"only_an_integer": 0.2, "right": 0.8},
}
GOOD = ScoreItem(None, "3", {"answer": "3"})


@pytest.fixture
def hostile(monkeypatch):
    """Teaches the service and its workers the grader that misbehaves."""
    monkeypatch.setitem(graders.GRADERS, "hostile", Hostile)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return PoolSettings(
        num_workers=1, memory_bytes=512 << 20, imports=("tests.support.hostile_graders",)
    )


@asynccontextmanager
async def service(pool=None, limits=None):
    pool = pool or PoolSettings(num_workers=1)
    limits = limits or ServiceLimits()
    async with reward_server("127.0.0.1", 0, 0, pool, limits, Lifecycle()) as server:
        client = RewardClient([server.address], patience_s=0.0)
        try:
            yield server, client
        finally:
            await client.close()


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # the state of another process
            await asyncio.sleep(0.005)


def items(*dos):
    return [ScoreItem(None, f"c{i}", do) for i, do in enumerate(dos)]


async def test_the_quickstart_grader_by_grpc_and_rest():
    texts = ["3", "4 - 1 = 3", " -4 ", "no idea", "It is\n3."]
    wanted = [1.0, 0.8, 0.2, 0.0, 0.8]
    async with service() as (server, client), httpx.AsyncClient() as http:
        by_grpc = await client.score(
            "", "job", QUICKSTART, [ScoreItem("4 - 1?", t, {"answer": "3"}) for t in texts], 5.0
        )
        body = {
            "grader": QUICKSTART,
            "items": [{"completion": t, "item": {"answer": "3"}, "prompt": "?"} for t in texts],
        }
        answer = await http.post(server.http_address + "/v1/score", json=body)
        assert [s.reward for s in by_grpc] == wanted
        assert by_grpc[1].parts == {"only_an_integer": 0.0, "right": 1.0}
        assert all(s.error_kind == "" and s.duration_s > 0 for s in by_grpc)
        results = answer.json()["results"]
        assert [r["reward"] for r in results] == wanted
        assert results[1]["parts"] == {"only_an_integer": 0.0, "right": 1.0}
        assert (await http.get(server.http_address + "/readyz")).status_code == 200
        metrics = (await http.get(server.http_address + "/metrics")).text
        assert 'headway_reward_items_total{grader="sum",outcome="ok"}' in metrics
        assert "headway_reward_queued_items 0.0" in metrics
        assert await client.score("", "", QUICKSTART, [], 5.0) == ()


async def test_an_item_without_a_reference_is_null_among_good_ones():
    mixed = [GOOD, ScoreItem(None, "3", {}), ScoreItem(None, "3", {"answer": "many"}), GOOD]
    async with service() as (server, client), httpx.AsyncClient() as http:
        scores = await client.score("", "", QUICKSTART, mixed, 5.0)
        assert [s.reward for s in scores] == [1.0, None, None, 1.0]
        assert [s.error_kind for s in scores] == ["", "bad_input", "bad_input", ""]
        assert scores[1].error_message.startswith("right: item.answer does not exist")
        body = {"grader": QUICKSTART, "items": [{"completion": "3"}]}
        answer = (await http.post(server.http_address + "/v1/score", json=body)).json()
        assert answer["results"][0]["reward"] is None


async def test_damaged_json_of_one_item_is_that_items_error():
    request = reward_pb2.ScoreRequest(grader_json=json.dumps(QUICKSTART))
    for text in ('{"answer": "3"}', "{", "[1]", '{"answer": 3}'):
        request.items.add(completion="3", item_json=text)
    async with service() as (server, _), channel(server.address) as link:
        answer = await reward_pb2_grpc.RewardServiceStub(link).Score(request, timeout=20)
        assert [r.error_kind for r in answer.results] == ["", "bad_input", "bad_input", ""]
        assert [r.HasField("reward") for r in answer.results] == [True, False, False, True]


async def test_odd_characters_and_numbers_travel():
    odd = {
        "grader": {"type": "string_check", "operation": "eq"},
        "items": [
            {"completion": "\ud800", "item": {"answer": "\ud800"}},
            {"completion": "é\u0000😀", "item": {"answer": "é\u0000😀"}},
            {"completion": str(10**40), "item": {"answer": 10**40}},
        ],
    }
    async with service() as (server, _), httpx.AsyncClient() as http:
        answer = await http.post(
            server.http_address + "/v1/score",
            content=json.dumps(odd),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 200, answer.text
        assert [r["reward"] for r in answer.json()["results"]] == [1.0, 1.0, 1.0]


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


async def test_a_repeated_request_id_is_scored_once(hostile, tmp_path):
    gate, log = tmp_path / "gate", tmp_path / "log"
    spec = {"type": "hostile", "log": str(log)}
    wait = items({"do": "wait_for", "file": str(gate)})
    async with service(hostile) as (_, client):
        twins = [asyncio.create_task(client.score("r1", "j", spec, wait, 30.0)) for _ in range(2)]
        await until(log.exists)
        gate.touch()
        first, second = await asyncio.gather(*twins)
        later = await client.score("r1", "j", spec, wait, 30.0)
        assert first == second == later
        assert first[0].reward == 1.0
        assert log.read_text() == "c0\n"
        with pytest.raises(Conflict, match="'r1' was used for another request"):
            await client.score("r1", "j", spec, items({}), 30.0)
        await client.score("r2", "j", spec, wait, 30.0)
        assert log.read_text() == "c0\nc0\n"


async def test_remembered_answers_are_bounded():
    async with service(limits=ServiceLimits(max_remembered=4)) as (server, client):
        for number in range(5):
            await client.score(f"r{number}", "", QUICKSTART, [GOOD, GOOD], 5.0)
        assert list(server.scorer._known) == ["r3", "r4"]


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
        assert full.status_code == 503
        assert full.json()["error"]["kind"] == "no_capacity"
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
    # One batch of the big job (64 items) goes first; the small one is next, not last.
    assert log.read_text().splitlines().index("small") == 1 + 64


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


@pytest.mark.parametrize(
    "grader, message",
    [
        ({"type": "numerc"}, "unknown grader 'numerc' (did you mean numeric?)"),
        ({"type": "numeric", "extrct": "last"}, "did you mean grader.extract?"),
        ({"type": "numeric", "timeout_s": 1e6}, "exceeds this service's limit"),
    ],
)
async def test_a_faulty_grader_is_invalid_by_both_doors(grader, message):
    async with service() as (server, client), httpx.AsyncClient() as http:
        with pytest.raises(InvalidSpec) as refused:
            await client.score("", "", grader, [GOOD], 5.0)
        assert message in str(refused.value)
        request = reward_pb2.ScoreRequest(grader_json=json.dumps(grader))
        async with channel(server.address) as link:
            with pytest.raises(grpc.aio.AioRpcError) as status:
                await reward_pb2_grpc.RewardServiceStub(link).Score(request, timeout=20)
        assert status.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        answer = await http.post(
            server.http_address + "/v1/score", json={"grader": grader, "items": []}
        )
        assert answer.status_code == 422
        assert message in answer.json()["error"]["message"]
        unknown = await http.post(
            server.http_address + "/v1/score", json={"grader": QUICKSTART, "itms": []}
        )
        assert unknown.status_code == 422


async def test_requests_and_items_beyond_the_limits():
    limits = ServiceLimits(max_items=2, max_item_bytes=100, max_request_bytes=1000)
    async with service(limits=limits) as (_, client):
        with pytest.raises(InvalidSpec, match="3 items: one request takes at most 2"):
            await client.score("", "", QUICKSTART, [GOOD] * 3, 5.0)
        long = ScoreItem(None, "3" * 200, {"answer": "3"})
        scores = await client.score("", "", QUICKSTART, [long, GOOD], 5.0)
        assert [s.error_kind for s in scores] == ["bad_input", ""]
        with pytest.raises(InvalidSpec, match="one request takes 1000"):
            await client.score("", "", QUICKSTART, [ScoreItem(None, "3" * 2000, {})], 5.0)


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


async def test_the_client_goes_on_to_a_service_that_answers():
    async with service() as (server, _):
        client = RewardClient(["127.0.0.1:1", server.address], patience_s=30.0)
        for number in range(3):
            (score,) = await client.score(f"r{number}", "", QUICKSTART, [GOOD], 5.0)
            assert score.reward == 1.0
        client.update_addresses([])
        impatient = RewardClient([], patience_s=0.0)
        with pytest.raises(Unavailable, match="no reward service is known"):
            await impatient.score("r", "", QUICKSTART, [GOOD], 5.0)
        assert client.addresses == ()
        await client.close()


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


async def test_s047_a_wrong_number_of_scores_is_an_error_with_both_counts():
    async with reward_stub(num_too_few=1) as (address, _):
        client = RewardClient([address], patience_s=0.0)
        spec = {"type": "string_check", "operation": "eq"}
        with pytest.raises(HeadwayError, match=r"1 scores for 2 items \(grader 'string_check'\)"):
            await client.score("", "job", spec, [GOOD, GOOD], 1.0)
        await client.close()


async def test_the_calls_deadline_follows_the_graders_own_limit():
    async with reward_stub() as (address, deadlines):
        client = RewardClient([address], patience_s=0.0)
        spec = {"type": "string_check", "operation": "eq"}
        await client.score("", "job", spec, [GOOD], 1.0)
        await client.score("", "job", {**spec, "timeout_s": 100.0}, [GOOD, GOOD], 1.0)
        await client.close()
    # gRPC rounds a deadline up, to whole seconds when it is far
    assert 25 < deadlines[0] <= 2 * 1.0 + 30 + 1
    assert 300 < deadlines[1] <= 3 * 100.0 + 30 + 1


@asynccontextmanager
async def reward_stub(num_too_few=0):
    """A service that notes how long its callers wait, and scores everything 1."""
    deadlines = []

    class Notes(reward_pb2_grpc.RewardServiceServicer):
        async def Score(self, request, context):
            deadlines.append(context.time_remaining())
            result = reward_pb2.ScoreResult(reward=1.0)
            return reward_pb2.ScoreResponse(results=[result] * (len(request.items) - num_too_few))

    def register(server):
        reward_pb2_grpc.add_RewardServiceServicer_to_server(Notes(), server)
        return ()

    async with grpc_server("127.0.0.1", 0, register) as port:
        yield f"127.0.0.1:{port}", deadlines
