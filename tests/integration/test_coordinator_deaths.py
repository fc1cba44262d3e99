"""What the coordinator survives, what it lets go, and how it ends."""

import asyncio
import os
import socket
import subprocess
import sys

import grpc
import httpx
import pytest

from headway.client import AsyncHeadwayClient
from headway.errors import NoCapacity, Unavailable
from headway.fleet.agent import FleetAgent
from headway.journal import Journal
from headway.lifecycle import Lifecycle
from headway.pb import fleet_pb2, types_pb2
from headway.valkey import EmbeddedValkey
from tests.support.fleet import (
    SPEC,
    CoordinatorProcess,
    ScriptedNode,
    collect,
    emptied,
    eventually,
    own_db,
)


@pytest.fixture
def store(valkey_url):
    return own_db(valkey_url)


@pytest.fixture
async def redis(store):
    async with emptied(store) as client:
        yield client


async def test_sigterm_ends_open_streams_and_exits_0(store, redis):
    coordinator = CoordinatorProcess(store)
    async with (
        AsyncHeadwayClient(coordinator.url) as client,
        httpx.AsyncClient(base_url=coordinator.url) as http,
    ):
        await client.submit(SPEC, "j", queue=True)
        async with http.stream("GET", "/v1/jobs/j/stream") as answer:
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("id:"):
                pass
            assert await asyncio.to_thread(coordinator.terminate) == 0
    assert [row for row in coordinator.log if row["level"] == "error"] == []


async def state_is(client, job_id, state):
    async def look():
        record = await client.job(job_id)
        return record if record.state == state else None

    return await eventually(look)


async def test_a_killed_coordinator_carries_on_with_the_same_nodes_and_attempt(store, redis):
    first = CoordinatorProcess(store, "--heartbeat-s", "0.2", "--lost-after-s", "30")
    ports = first.ports
    life = Lifecycle()
    said = {}
    learner = agent(first.grpc_address, "l1", types_pb2.ROLE_LEARNER, said)
    rollout = agent(first.grpc_address, "r1", types_pb2.ROLE_ROLLOUT, {})
    reward = agent(first.grpc_address, "s1", types_pb2.ROLE_REWARD, {})
    tasks = [asyncio.create_task(a.run(life)) for a in (learner, rollout, reward)]
    second = None
    try:
        async with AsyncHeadwayClient(first.url) as client:
            await eventually(lambda: fleet_of(client, 3))
            await client.submit(SPEC, "j")
            followed = asyncio.create_task(collect(client.follow("j")))
            await state_is(client, "j", "running")
            first.kill()
            with pytest.raises(Unavailable, match="no coordinator answers"):
                await client.job("j")
            said["j"] = fleet_pb2.JobStatus(job_id="j", phase="running", version=2)
            await Journal(redis, "j").append_metrics(1, {"x": 1.0})
            second = CoordinatorProcess(
                store, "--heartbeat-s", "0.2", "--lost-after-s", "30", **ports
            )
            await eventually(lambda: step_is(client, "j", 2))
            record = await client.job("j")
            assert (record.state, record.attempt, record.rollouts) == ("running", 1, ("r1",))
            said["j"] = fleet_pb2.JobStatus(job_id="j", phase="succeeded", version=3)
            await state_is(client, "j", "succeeded")
            updates = await asyncio.wait_for(followed, 20)
        kinds = [u.row["kind"] for u in updates if u.kind == "event" and u.row["kind"] != "waiting"]
        assert kinds == ["submitted", "assigned", "starting", "running", "succeeded"]
        assert [u.row["step"] for u in updates if u.kind == "metrics"] == [1]
        await eventually(lambda: forgotten(said))
    finally:
        life.stopping.set()
        await asyncio.gather(*tasks)
        first.kill()
        if second is not None:
            second.kill()


def agent(address, node_id, role, said):
    """A real FleetAgent that runs whatever it is assigned and reports `said`."""

    async def reconcile(assignments):
        wanted = {a.job_id for a in assignments}
        for job_id in wanted - said.keys():
            said[job_id] = fleet_pb2.JobStatus(job_id=job_id, phase="running")
        for job_id in said.keys() - wanted:
            del said[job_id]

    node = fleet_pb2.Node(node_id=node_id, role=role, address="127.0.0.1:1", pid=1)
    return FleetAgent(address, node, reconcile, lambda: list(said.values()))


async def forgotten(said):
    return not said


async def fleet_of(client, size):
    nodes = (await client.fleet())["nodes"]
    return len(nodes) == size and all(node["heard"] for node in nodes)


async def step_is(client, job_id, step):
    try:
        return (await client.job(job_id)).step == step
    except Unavailable:
        return None


async def test_a_silent_learner_is_replaced_and_a_silent_rollout_node_let_go(store, redis):
    process = CoordinatorProcess(store, "--heartbeat-s", "0.1", "--lost-after-s", "2")
    speaking = [
        ScriptedNode(process.grpc_address, *who)
        for who in (("l2", "learner"), ("r2", "rollout"), ("s1", "reward"))
    ]
    silent = [
        ScriptedNode(process.grpc_address, *who) for who in (("l1", "learner"), ("r1", "rollout"))
    ]
    beating = []
    try:
        for node in (*silent, *speaking):
            await node.register()
        beating = [asyncio.create_task(keep_beating(node)) for node in speaking]
        async with AsyncHeadwayClient(process.url) as client:
            await client.submit(SPEC, "j")
            record = await eventually(lambda: attempt_is(client, "j", 2))
            assert (record.learner, record.rollouts) == ("l2", ("r2",))
            lost = [
                r["node_id"] for r in (await client.events("j")).rows if r["kind"] == "member_lost"
            ]
            assert sorted(lost) == ["l1", "r1"]
    finally:
        for task in beating:
            task.cancel()
        for node in (*silent, *speaking):
            await node.close()
        process.kill()


async def keep_beating(node):
    while True:
        await node.beat()
        await asyncio.sleep(0.1)


async def attempt_is(client, job_id, attempt):
    record = await client.job(job_id)
    return record if record.attempt == attempt else None


async def test_redis_lost_and_back(tmp_path):
    with EmbeddedValkey(tmp_path) as server:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        process = CoordinatorProcess(server.url, "--lost-after-s", "60")
        learner = ScriptedNode(process.grpc_address, "l1", "learner")
        try:
            await learner.register()
            async with (
                AsyncHeadwayClient(process.url) as client,
                httpx.AsyncClient(base_url=process.url) as http,
            ):
                await client.submit(SPEC, "j", queue=True)
                await eventually(lambda: ready_is(http, 200))
                await asyncio.to_thread(server.stop)
                await eventually(lambda: ready_is(http, 503))
                assert (await http.get("/healthz")).status_code == 200
                for call in (
                    client.job("j"),
                    client.jobs(),
                    client.submit(SPEC),
                    client.cancel("j"),
                ):
                    with pytest.raises((Unavailable, NoCapacity)):
                        await call
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await learner.beat()
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
                back = EmbeddedValkey(tmp_path, port)
                with back:
                    await eventually(lambda: ready_is(http, 200))
                    assert (await client.job("j")).state == "queued"
                    assert await learner.beat() == {}
        finally:
            await learner.close()
            process.kill()


async def ready_is(http, status):
    return (await http.get("/readyz")).status_code == status


# -- a start that cannot be ------------------------------------------------------------


def start(*flags, redis_url):
    argv = [sys.executable, "-m", "services.coordinator", *flags]
    env = {**os.environ, "HEADWAY_REDIS_URL": redis_url}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)


def test_starts_that_cannot_be_end_with_a_clear_error(store):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong = store.replace("redis://:", "redis://:not")
        for flags, url, code, text in (
            ((), f"redis://127.0.0.1:{port}", 3, "did not answer"),
            ((), "redis://127.0.0.1:1", 3, "cannot reach Redis at redis://127.0.0.1:1/0"),
            ((), wrong, 3, "wrong or missing password"),
            ((), "http://x", 2, "not a Redis URL"),
            (("--http-port", port), store, 3, f"{port} (HTTP): Address already in use"),
            (("--port", port), store, 3, f"{port} (gRPC): the port is in use"),
            (("--host", "0.0.0.0"), store, 2, "not a loopback address"),
            (("--lost-after-s", "0.5"), store, 2, "--heartbeat-s"),
            (("--redis", store), "", 2, "a password on the command line is seen by everyone"),
            (("--no-such-flag",), store, 2, "--no-such-flag"),
        ):
            done = start(*flags, redis_url=url)
            assert done.returncode == code, done.stderr
            assert text in done.stderr
            assert "Traceback" not in done.stderr and "not" + store[9:20] not in done.stderr
