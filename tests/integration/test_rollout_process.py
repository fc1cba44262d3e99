"""A rollout node as a process: settings refused, signals, health."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys

import grpc
import openai
import pytest

from headway.cli import run_command
from headway.leash import leashed
from headway.ports import free_port
from tests.support.desk import Service
from tests.support.rollout_house import BATCH, house


async def test_sigterm_gives_unfinished_tickets_back_and_finishes_the_others(
    valkey_url, reward, job_id
):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=0, num_tickets=BATCH)
        it.assign(job_id, lag=0)
        node = await it.node("node-a", "--drain-s", "0.3", lengths="constant:4000", rate="100")
        await learner.install(0, await learner.members(1))
        await learner.until(lambda c: c.leased == BATCH)
        node.signal(signal.SIGTERM)
        assert await node.ended() == 0
        counts = await learner.ledger.counts()
        assert (counts.issued, counts.leased, counts.expired_leases) == (BATCH, 0, 0)
        assert await learner.ledger.members() == ()
        assert it.desk.left == {"node-a"}

        node = await it.node("node-b", lengths="constant:100", rate="200")
        await learner.install(0, await learner.members(1))
        await learner.until(lambda c: c.leased == BATCH)
        node.signal(signal.SIGTERM)
        assert await node.ended() == 0
        groups = await learner.take(0)
        assert [g.attempt for g in groups] == [1] * BATCH  # what was given back did not count


async def test_a_job_that_cannot_be_served_is_reported_with_its_error(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        where = ("--coordinator", it.desk.address, "--node-id", "node-v")
        node = Service("rollout", *where, "--engine", "vllm", redis_url=valkey_url)
        it.stack.callback(node.kill)
        await node.ready()
        it.assign("no-model")
        status = await it.desk.reported("node-v", "no-model", "failed")
        assert status.error_kind == "invalid" and "/nowhere" in status.detail
        it.desk.assignments.clear()
        it.desk.assign("no-spec", json.dumps({"rolout": {}}))
        status = await it.desk.reported("node-v", "no-spec", "failed")
        assert status.error_kind == "invalid" and "did you mean rollout" in status.detail
        node.signal(signal.SIGTERM)
        assert await node.ended() == 0


async def test_a_jobs_policy_can_be_sampled_from_outside_while_it_trains(
    valkey_url, reward, job_id
):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=0)
        node = await it.node("node-a", lengths="constant:100", rate="2000")
        url = next(row["http_address"] for row in node.log if "http_address" in row)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="no engine is loaded"):
            await client.models.list()
        it.assign(job_id, lag=0)
        members = await learner.members(1)
        with pytest.raises(openai.InternalServerError, match="no weights"):
            await client.completions.create(model=job_id, prompt="1 + 2")
        for version in (0, 1):
            await learner.install(version, members)
            answer = await client.completions.create(model=job_id, prompt="1 + 2", n=3)
            assert answer.weight_version == version and len(answer.choices) == 3
            assert len(await learner.take(version)) == BATCH
        it.desk.assignments.clear()  # the job is over; the node holds its last policy
        async with asyncio.timeout(30):
            while await learner.ledger.members():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        answer = await client.completions.create(model=job_id, prompt="1 + 2")
        assert answer.weight_version == 1
        it.assign("next-job")
        await it.desk.reported("node-a", "next-job", "running")
        with pytest.raises(openai.NotFoundError, match="there is 'next-job'"):
            await client.completions.create(model=job_id, prompt="1 + 2")
        with pytest.raises(openai.InternalServerError, match="no weights"):
            await client.completions.create(model="next-job", prompt="1 + 2")
        node.signal(signal.SIGTERM)
        assert await node.ended() == 0
        await client.close()


def test_a_model_is_served_by_one_command_without_fleet_job_or_redis():
    port = free_port()
    command = [sys.executable, "-m", "headway.cli", "serve", "/models/a", "--name", "a"]
    command += ["--engine", "sim", "--port", str(port), "--weight-version", "40"]
    process = subprocess.Popen(leashed(command, signal.SIGKILL), stderr=subprocess.DEVNULL)
    try:
        base = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=60) as client:
            (card,) = client.models.list().data  # asked again until the server is there
            assert (card.id, card.root, card.weight_version) == ("a", "/models/a", 40)
            answer = client.chat.completions.create(
                model="a", messages=[{"role": "user", "content": "1 + 2?"}], max_tokens=8
            )
            assert answer.weight_version == 40 and answer.usage.completion_tokens == 8
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_what_cannot_be_served_is_refused_before_anything_is_started(capfd):
    assert run_command(["serve", "/no/such/model"]) == 2
    assert "there is no such folder" in capfd.readouterr().err


def refused(*flags, redis_url="redis://127.0.0.1:1/0"):
    done = subprocess.run(
        [sys.executable, "-m", "services.rollout", *flags],
        env={**os.environ, "HEADWAY_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.returncode, done.stderr


HERE = ("--coordinator", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ((), 2, "--coordinator HOST:PORT is missing"),
        ((*HERE, "--host", "0.0.0.0"), 2, "not a loopback address"),
        ((*HERE, "--cores", "x"), 2, "not of the form 0,2-3"),
        ((*HERE, "--cores", "4095"), 2, "not all among"),
        ((*HERE, "--sim-lengths", "normal:3"), 2, "KIND:MEAN[:SIGMA]"),
        ((*HERE, "--sim-lengths", "uniform:x"), 2, "KIND:MEAN[:SIGMA]"),
        ((*HERE, "--sim-tokens-per-s", "0"), 2, "tokens_per_s > 0"),
        ((*HERE, "--engine", "magic"), 2, "invalid choice"),
        (HERE, 3, "cannot reach Redis at redis://127.0.0.1:1/0"),
    ],
)
def test_bad_settings_end_it_with_a_clear_error(flags, code, message):
    returned, text = refused(*flags)
    assert returned == code and message in text


def test_a_port_in_use_ends_it_with_a_clear_error(valkey_url):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = refused(*HERE, "--port", str(port), redis_url=valkey_url)
        assert code == 3 and f"127.0.0.1:{port} (gRPC): the port is in use" in text


async def test_a_second_sigterm_ends_it_now(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=0)
        it.assign(job_id, lag=0)
        node = await it.node("node-a", "--drain-s", "600", lengths="constant:4000", rate="1")
        await learner.install(0, await learner.members(1))
        await learner.until(lambda c: c.leased == BATCH)
        node.signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while await learner.ledger.members():  # noqa: ASYNC110 - it drains
                await asyncio.sleep(0.02)
        node.signal(signal.SIGTERM)
        assert await node.ended() == 130


async def test_the_service_is_reflected_and_healthy(valkey_url, reward):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with house(valkey_url, reward) as it:
        node = await it.node("node-a")
        async with grpc.aio.insecure_channel(node.address) as link:
            health = health_pb2_grpc.HealthStub(link)
            request = health_pb2.HealthCheckRequest(service="headway.v1.RolloutService")
            answer = await health.Check(request, timeout=5.0)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
