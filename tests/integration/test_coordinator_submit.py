"""Submitting to the coordinator: safe to repeat, and faulty jobs, requests and nodes refused."""

import asyncio
import json
import socket

import grpc
import httpx
import pytest

from headway.errors import InvalidSpec, NotFound
from headway.pb import fleet_pb2, fleet_pb2_grpc, types_pb2
from headway.rpc import channel
from tests.support.coordinator import kinds, small_fleet
from tests.support.fleet import (
    SPEC,
    eventually,
)

# -- S079: submitting is safe to repeat ------------------------------------------------


async def test_s079_five_posts_at_once_with_one_id_make_one_job(client, nodes, http):
    await small_fleet(nodes)
    body = {**SPEC, "job_id": "once"}
    answers = await asyncio.gather(*(http.post("/v1/jobs", json=body) for _ in range(5)))
    assert sorted(a.status_code for a in answers) == [200, 200, 200, 200, 201]
    assert {a.json()["job_id"] for a in answers} == {"once"}
    other = await http.post("/v1/jobs", json={**body, "seed": 1})
    assert (other.status_code, other.json()["error"]["kind"]) == (409, "conflict")
    assert len(await client.jobs()) == 1
    assert (await kinds(client, "once")).count("submitted") == 1


async def test_s079_five_posts_at_once_with_one_idempotency_key_make_one_job(
    client, nodes, coordinator
):
    await small_fleet(nodes)
    key = "any text, ä or 1"
    headers = {"Idempotency-Key": key.encode()}
    async with httpx.AsyncClient(base_url=coordinator.url, headers=headers) as http:
        answers = await asyncio.gather(*(http.post("/v1/jobs", json=SPEC) for _ in range(5)))
        assert sorted(a.status_code for a in answers) == [200, 200, 200, 200, 201]
        assert len({a.json()["job_id"] for a in answers}) == 1
        assert (await http.post("/v1/jobs", json={**SPEC, "seed": 1})).status_code == 409
        assert (await http.post("/v1/jobs", json={**SPEC, "job_id": "x"})).status_code == 409
    assert len(await client.jobs()) == 1


async def test_s079_a_client_that_died_before_the_answer_retries_safely(client, coordinator, nodes):
    await small_fleet(nodes)
    body = json.dumps({**SPEC, "job_id": "retried"}).encode()
    with socket.create_connection(("127.0.0.1", coordinator.ports["http_port"])) as link:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        link.sendall(head.encode() + body)
    await eventually(lambda: found(client, "retried"))
    again = await client.submit(SPEC, "retried")
    assert again.job_id == "retried"
    assert len(await client.jobs()) == 1


async def found(client, job_id):
    try:
        return await client.job(job_id)
    except NotFound:
        return None


async def test_a_repeat_is_answered_even_when_the_fleet_is_gone(client, nodes):
    fleet = await small_fleet(nodes)
    await client.submit(SPEC, "j", idempotency_key="k")
    for node in fleet:
        await node.leave()
    assert (await client.submit(SPEC, "j")).job_id == "j"
    assert (await client.submit(SPEC, idempotency_key="k")).job_id == "j"


# -- S075 and other bad input ----------------------------------------------------------


async def test_s075_every_unknown_key_is_named_with_its_path_and_the_nearest_known(client):
    raw = {
        **SPEC,
        "rollout": {"temprature": 1.0},
        "algoritm": {},
        "reward": {"grader": {"type": "reasoning_gim"}},
        "trainer": {},
    }
    with pytest.raises(InvalidSpec) as caught:
        await client.submit(raw)
    for part in (
        "rollout.temprature (did you mean rollout.temperature?)",
        "algoritm (did you mean algorithm?)",
        "reward.grader.type: unknown grader 'reasoning_gim' (did you mean reasoning_gym?)",
        "missing key trainer.total_training_steps",
    ):
        assert part in str(caught.value)
    assert await client.jobs() == []


YAML_JOB = b"""\
name: sum
model: {path: /models/tiny}
data: {source: reasoning_gym, name: chain_sum}
reward: {grader: {type: reasoning_gym}}
trainer: {total_training_steps: 3}
"""


async def test_yaml_and_json_are_the_same_job(client, http):
    params = {"queue": "true", "job_id": "y"}
    posted = await http.post("/v1/jobs", params=params, content=b"\xef\xbb\xbf" + YAML_JOB)
    assert (posted.status_code, posted.headers["location"]) == (201, "/v1/jobs/y")
    assert (await http.post("/v1/jobs", params=params, json=SPEC)).status_code == 200


LAUGHS = b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
RUBBISH = [
    (b"", 422), (b"null", 422), (b"[]", 422), (b"7", 422), (b"\xff\xfe", 422), (b"{", 422),
    (b"[" * 100_000, 422), (b'{"a":' * 5000, 422), (LAUGHS, 422), (b"? [a]\n: b", 422),
    (b"a: 2020-01-01", 422), (b"a: !!binary aGk=", 422), (b"a: !!set {x}", 422), (b"1: 2", 422),
    (b"a: .nan", 422), (b"a: !!python/object:os.system x", 422), (b"x" * 300_000, 413),
    (b'{"name": "\\ud800"}', 422), (b'{"\\udfff": 1}', 422), (b'{"job_id": 5}', 422),
    (b"a: " + b"9" * 5000, 422), (b"a: !!timestamp x", 422), (b"\x00", 422), (b"a: !!int x", 422),
]  # fmt: skip


@pytest.mark.parametrize("content_type", ["application/json", "application/yaml", ""])
async def test_rubbish_is_the_senders_fault(client, content_type, http):
    for body, status in RUBBISH:
        headers = {"Content-Type": content_type}
        answer = await http.post("/v1/jobs?queue=true", content=body, headers=headers)
        assert answer.status_code == status, (body[:40], answer.text)
        assert answer.json()["error"]["kind"] == "invalid"
    assert await client.jobs() == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/jobs/none", 404),
        ("GET", "/v1/jobs/%7Bx%7D%0a", 404),
        ("GET", "/v1/jobs/" + "a" * 5000, 404),
        ("GET", "/v1/jobs/none/events", 404),
        ("GET", "/v1/jobs/none/stream", 404),
        ("POST", "/v1/jobs/none/cancel", 404),
        ("DELETE", "/v1/jobs", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/jobs?limit=0", 422),
        ("GET", "/v1/jobs?limit=x", 422),
        ("GET", "/v1/jobs?after=none", 422),
        ("GET", "/v1/jobs/j/events?after=x", 422),
        ("GET", "/v1/jobs/j/events?after=99999999999999999999", 422),
        ("GET", "/v1/jobs/j/metrics?limit=1001", 422),
        ("GET", "/v1/jobs/j/stream?after=1-0", 422),
        ("GET", "/v1/jobs/j/stream?after=1/2/3", 422),
        ("POST", "/v1/jobs?queue=perhaps", 422),
        ("POST", "/v1/jobs?job_id=A", 422),
    ],
)
async def test_faulty_requests_get_a_clear_4xx(client, method, path, status, http):
    await client.submit(SPEC, "j", queue=True)
    answer = await http.request(
        method, path, **({"json": SPEC} if "?" in path and method == "POST" else {})
    )
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


async def test_a_node_without_name_role_or_phase_is_refused(coordinator):
    async with channel(coordinator.grpc_address) as link:
        stub = fleet_pb2_grpc.FleetServiceStub(link)
        good = {"node_id": "n", "address": "h:1", "role": types_pb2.ROLE_ROLLOUT}
        for fault in ({"node_id": ""}, {"role": 0}, {"role": 9}, {"address": "a\nb"}):
            node = fleet_pb2.Node(**{**good, **fault})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Register(fleet_pb2.RegisterRequest(node=node), timeout=5)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        answer = await stub.Register(
            fleet_pb2.RegisterRequest(node=fleet_pb2.Node(**good)), timeout=5
        )
        assert (answer.heartbeat_interval_s, answer.lost_after_s) == (1.0, 60.0)
        nonsense = [fleet_pb2.JobStatus(job_id="j", phase="dancing")]
        with pytest.raises(grpc.aio.AioRpcError, match="dancing"):
            await stub.Heartbeat(fleet_pb2.HeartbeatRequest(node_id="n", jobs=nonsense), timeout=5)
