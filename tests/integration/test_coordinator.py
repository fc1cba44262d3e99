"""The coordinator as it runs: its own process, a real Redis, real gRPC and HTTP."""

import asyncio
import json
import socket

import grpc
import httpx
import pytest

from headway.client import AsyncHeadwayClient, HeadwayClient
from headway.errors import Conflict, InvalidSpec, NoCapacity, NotFound, Unavailable
from headway.jobspec import parse_job
from headway.journal import Journal
from headway.pb import fleet_pb2, fleet_pb2_grpc, types_pb2
from headway.rpc import channel
from tests.support.fleet import (
    SPEC,
    CoordinatorProcess,
    ScriptedNode,
    collect,
    emptied,
    eventually,
    own_db,
)


@pytest.fixture(scope="module")
def process(redis_url):
    """One coordinator for all tests that leave it alive."""
    process = CoordinatorProcess(own_db(redis_url), "--lost-after-s", "60")
    yield process
    process.kill()


@pytest.fixture
async def redis(redis_url):
    async with emptied(own_db(redis_url)) as client:
        yield client


@pytest.fixture
def coordinator(process, redis):
    return process


@pytest.fixture
async def client(coordinator):
    async with AsyncHeadwayClient(coordinator.url) as client:
        yield client


@pytest.fixture
async def http(coordinator):
    async with httpx.AsyncClient(base_url=coordinator.url) as http:
        yield http


@pytest.fixture
async def nodes(coordinator):
    """Makes registered nodes: `await nodes("learner", "l1")`."""
    made = []

    async def make(role: str, node_id: str, **more) -> ScriptedNode:
        made.append(ScriptedNode(coordinator.grpc_address, node_id, role, **more))
        return await made[-1].register()

    yield make
    for node in made:
        await node.leave()
        await node.close()


async def kinds(client, job_id):
    return [row["kind"] for row in (await client.events(job_id)).rows]


async def small_fleet(nodes):
    return await nodes("learner", "l1"), await nodes("rollout", "r1"), await nodes("reward", "s1")


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
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
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


# -- streams ---------------------------------------------------------------------------


async def test_a_stream_resumes_after_any_id_and_closes_at_the_end(client, nodes, http):
    learner, *_ = await small_fleet(nodes)
    await client.submit(SPEC, "j")
    await learner.work("j")
    learner.say("j", "succeeded", version=3)
    await learner.beat()
    whole = await messages(http, "/v1/jobs/j/events")
    assert [m["event"] for m in whole] == ["event"] * 4 + ["end"]
    assert [json.loads(m["data"])["kind"] for m in whole[:4]] == [
        "submitted", "assigned", "starting", "succeeded",
    ]  # fmt: skip
    assert json.loads(whole[-1]["data"])["state"] == "succeeded"
    for place in range(5):
        after = {"Last-Event-ID": whole[place]["id"]}
        rest = await messages(http, "/v1/jobs/j/events", after)
        assert rest == whole[place + 1 :] or (place == 4 and rest == whole[4:])
    pages = (await http.get("/v1/jobs/j/events", params={"limit": 3})).json()
    rest = (await http.get("/v1/jobs/j/events", params={"after": pages["next_after"]})).json()
    ids = [row["id"] for row in pages["rows"] + rest["rows"]]
    assert ids == [m["id"] for m in whole[:4]]
    assert (await messages(http, "/v1/jobs/j/metrics"))[-1]["event"] == "end"


async def messages(http, path, headers=None):
    """The messages of a stream that ends by itself."""
    headers = {"Accept": "text/event-stream", **(headers or {})}
    answer = await http.get(path, headers=headers, timeout=20)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [b for b in answer.text.split("\n\n") if b and not b.startswith((":", "retry"))]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


async def test_lists_are_paged_newest_first(client, http):
    for number in range(5):
        await client.submit(SPEC, f"j{number}", queue=True)
    seen, after = [], ""
    while True:
        page = (await http.get("/v1/jobs", params={"limit": 2, "after": after})).json()
        seen += [row["job_id"] for row in page["jobs"]]
        if not (after := page["next_after"]):
            break
    assert seen == ["j4", "j3", "j2", "j1", "j0"]


# -- the blocking client ---------------------------------------------------------------


async def test_the_blocking_client_does_the_same(coordinator, nodes, client):
    learner, *_ = await small_fleet(nodes)

    def use() -> tuple:
        with HeadwayClient(coordinator.url) as blocking:
            record = blocking.submit(parse_job(SPEC), "j")
            updates = list(blocking.follow("j"))
            return record, updates, blocking.job("j"), blocking.jobs()

    using = asyncio.create_task(asyncio.to_thread(use))
    await learner.work("j")
    learner.say("j", "succeeded", version=3)
    await learner.beat()
    record, updates, last, jobs = await using
    assert (record.job_id, last.state, [j.job_id for j in jobs]) == ("j", "succeeded", ["j"])
    assert [u.row["kind"] for u in updates] == ["submitted", "assigned", "starting", "succeeded"]


def test_the_blocking_client_when_nobody_is_there():
    with HeadwayClient("http://127.0.0.1:1") as client:
        for call in (
            client.jobs,
            client.fleet,
            lambda: client.job("j"),
            lambda: client.submit(SPEC),
        ):
            with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1"):
                call()
        with pytest.raises(Unavailable):
            list(client.follow("j", patience_s=0.0))
        with pytest.raises(NotFound):
            client.job("../fleet")
