"""Rollout nodes as processes: real gRPC, a real Valkey, a real reward service, the sim engine."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from headway.codec import unpack_group
from headway.errors import Conflict, EpochBroken, NotFound
from headway.journal import Journal
from headway.ledger.api import LedgerConfig, Member
from headway.ledger.redis_ledger import RedisLedger
from headway.messages import EpochInvite, Ticket, WeightManifest
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.redis_client import connect
from headway.rpc import channel
from headway.valkey import EmbeddedValkey
from headway.weights.members import MemberClient
from tests.support.desk import Service, desk

BATCH, N = 4, 4
GRADER = {"type": "regex", "pattern": "7"}  # about half of the sim engine's texts have one


def spec_json(lag=2, lease_s=30.0, max_num_seqs=16, **reward):
    return json.dumps(
        {
            "model": {"path": "/nowhere", "max_model_len": 8192},
            "data": {"source": "reasoning_gym", "name": "chain_sum", "train_batch_size": BATCH},
            "reward": {"grader": GRADER, **reward},
            "algorithm": {"max_policy_lag": lag},
            "rollout": {
                "n": N,
                "max_num_seqs": max_num_seqs,
                "lease_s": lease_s,
                "max_tokens": 4000,
            },
            "trainer": {"total_training_steps": 9},
        }
    )


class Learner:
    """A job's other side: issues, installs, takes and commits."""

    def __init__(self, redis, job_id):
        self.job_id = job_id
        self.ledger = RedisLedger(redis, job_id)
        self.clients = {}

    async def open(self, lag=2, lease_s=30.0, num_tickets=40):
        config = LedgerConfig(BATCH, lag, lease_s=lease_s, max_outstanding_groups=num_tickets)
        await self.ledger.open(config)
        await self.issue(num_tickets)

    async def issue(self, num_tickets):
        begin = (await self.ledger.counts()).issued_total
        await self.ledger.issue(
            [
                Ticket(i, (1, 2), f"question {i}", {"answer": str(i)}, N, i)
                for i in range(begin, begin + num_tickets)
            ]
        )

    async def members(self, count):
        async with asyncio.timeout(30):
            while len(found := await self.ledger.members()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return found

    def client(self, member):
        if member.address not in self.clients:
            self.clients[member.address] = MemberClient(self.job_id, member)
        return self.clients[member.address]

    async def install(self, version, members, timeout_s=20.0):
        manifest = WeightManifest(version, (), 0)
        calls = [self.client(m).install(0, manifest, timeout_s) for m in members]
        return await asyncio.gather(*calls)

    async def status(self, member):
        async with channel(member.address) as link:
            stub = rollout_pb2_grpc.RolloutServiceStub(link)
            return await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=5.0)

    async def sampled(self, members, more):
        """Returns when the members have sampled so many tokens more."""

        async def total():
            found = await asyncio.gather(*map(self.status, members))
            return sum(status.num_tokens_sampled for status in found)

        goal = await total() + more
        async with asyncio.timeout(30):
            while await total() < goal:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def take(self, step):
        """The groups of a step, committed."""
        async with asyncio.timeout(30):
            while (taken := await self.ledger.take(step)).ticket_ids is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        groups = [unpack_group(body) for body in await self.ledger.payloads(taken.ticket_ids)]
        await self.ledger.commit(step, taken.ticket_ids)
        return groups

    async def until(self, test):
        """Returns the counts once they pass the test."""
        async with asyncio.timeout(30):
            while not test(counts := await self.ledger.counts()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert counts.conserved
        return counts

    async def close(self):
        for client in self.clients.values():
            await client.close()


@pytest.fixture(scope="module")
def reward():
    """A real reward service."""
    service = Service("reward", "--workers", "1")
    asyncio.run(service.ready())
    yield service.address
    service.kill()


class House:
    """One test's desk, nodes and jobs."""

    def __init__(self, desk, redis, url, reward, stack):
        self.desk = desk
        self.redis = redis
        self.url = url
        self.reward = reward
        self.stack = stack
        self.nodes = {}

    async def node(self, node_id, *flags, lengths="constant:100", rate="200"):
        sim = ("--engine", "sim", "--sim-tokens-per-s", rate, "--sim-lengths", lengths)
        where = ("--coordinator", self.desk.address, "--node-id", node_id)
        node = Service("rollout", *where, *sim, *flags, redis_url=self.url)
        self.stack.callback(node.kill)
        self.nodes[node_id] = node
        return await node.ready()

    def learner(self, job_id):
        learner = Learner(self.redis, job_id)
        self.stack.push_async_callback(learner.close)
        return learner

    def assign(self, job_id, **spec):
        self.desk.assign(job_id, spec_json(**spec), reward_addresses=[self.reward])


@asynccontextmanager
async def house(url, reward):
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(desk())
        redis = connect(url)
        stack.push_async_callback(redis.aclose)
        yield House(served, redis, url, reward, stack)


async def test_two_nodes_serve_one_job_and_updates_split_completions(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open()
        it.assign(job_id)
        # of 8 groups begun together, 4 are still on their way when the first step has its 4
        slow = {"lengths": "uniform:60", "rate": "40"}
        await asyncio.gather(it.node("node-a", **slow), it.node("node-b", **slow))
        members = await learner.members(2)
        assert members == (
            Member("node-a", it.nodes["node-a"].address, "none", None),
            Member("node-b", it.nodes["node-b"].address, "none", None),
        )
        assert (await learner.ledger.counts()).issued == 40  # no claim before the first weights
        reports = await learner.install(0, members)
        assert [r.version for r in reports] == [0, 0]
        seen, nodes, split = set(), set(), 0
        for step in range(4):
            for group in await learner.take(step):
                assert group.ticket.ticket_id not in seen
                seen.add(group.ticket.ticket_id)
                nodes.add(group.node_id)
                assert len(group.completions) == N and group.attempt == 1
                for completion in group.completions:
                    assert 1 <= len(completion.token_ids) == len(completion.logprobs) < 120
                    ends = [0, *(span.end for span in completion.spans)]
                    assert [span.start for span in completion.spans] == ends[:-1]
                    assert ends[-1] == len(completion.token_ids)
                    assert group.start_version <= completion.oldest_version
                    assert step - 2 <= completion.oldest_version <= step
                    split += len(completion.spans) > 1
                    assert completion.reward == float("7" in completion.text)
            await learner.install(step + 1, members)
        assert nodes == {"node-a", "node-b"}
        assert split > 0
        status = await it.desk.reported("node-a", job_id, "running")
        assert status.version in (3, 4)


async def test_s035_a_node_that_stood_still_past_its_lease_delivers_nothing_twice(
    valkey_url, reward, job_id
):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=0, lease_s=2.0, num_tickets=BATCH)
        it.assign(job_id, lag=0, lease_s=2.0)
        await it.node("slow")
        [slow] = await learner.members(1)
        await learner.install(0, [slow])
        await learner.until(lambda c: c.leased == BATCH)
        it.nodes["slow"].signal(signal.SIGSTOP)
        await learner.until(lambda c: c.expired_leases == BATCH)
        await it.node("other")
        members = await learner.members(2)
        await learner.install(0, [m for m in members if m.node_id == "other"])
        await learner.until(lambda c: c.delivered == BATCH)
        it.nodes["slow"].signal(signal.SIGCONT)
        groups = await learner.take(0)
        assert [(g.node_id, g.attempt) for g in groups] == [("other", 2)] * BATCH
        # what it held is lost to it, whether it was still sampling or came too late
        await learner.issue(BATCH)
        await learner.install(1, [slow])
        assert {g.node_id for g in await learner.take(1)} == {"slow"}
        counts = await learner.until(lambda c: c.consumed == 2 * BATCH)
        assert (counts.issued_total, counts.abandoned) == (2 * BATCH, 0)
        messages = [row["message"] for row in it.nodes["slow"].log]
        lost = "a lease was lost; its work stops", "a late delivery was refused"
        assert sum(message in lost for message in messages) == BATCH


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


async def test_s019_control_calls_do_not_wait_behind_work(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=63, num_tickets=256)
        it.assign(job_id, lag=63, max_num_seqs=256 * N)
        node = await it.node("node-a", lengths="constant:400", rate="10")
        [member] = await learner.members(1)
        await learner.install(0, [member])
        await learner.until(lambda c: c.leased == 256)
        await learner.sampled([member], 1)
        async with channel(node.address) as link:
            stub = rollout_pb2_grpc.RolloutServiceStub(link)
            installing = asyncio.create_task(learner.install(1, [member], 5.0))
            for _ in range(20):
                status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=1.0)
                assert status.num_tickets_in_flight == 256
                assert status.num_completions_in_flight == 256 * N
            [report] = await installing
            assert report.version == 1
            await learner.sampled([member], 1)
            status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=1.0)
            assert (status.job_id, status.version, status.node_id) == (job_id, 1, "node-a")
            assert status.num_tokens_sampled > 0 and status.busy_s > 0


def invite(job_id, epoch):
    return EpochInvite(job_id, epoch, "127.0.0.1", 1, 1, 2, "gloo", 5.0)


async def test_calls_for_another_job_or_a_past_epoch_are_refused(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open()
        it.assign(job_id)
        await it.node("node-a")
        [member] = await learner.members(1)
        stranger = it.learner("another-job")
        with pytest.raises(NotFound, match=f"serves job {job_id}, not job another-job"):
            await stranger.install(0, [member])
        client = learner.client(member)
        await client.join(invite(job_id, 7))
        await client.join(invite(job_id, 7))  # a repeat
        with pytest.raises(Conflict, match=r"epoch 6 .* is past: this node is in epoch 7"):
            await client.join(invite(job_id, 6))
        await client.leave(5.0)
        await client.join(invite(job_id, 6))
        assert (await learner.install(3, [member]))[0].version == 3


async def test_a_broken_install_stops_claims_until_the_next(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=0)
        it.assign(job_id, lag=0)
        await it.node("node-a", "--sim-install-pause-s", "0.3")
        members = await learner.members(1)
        with pytest.raises(EpochBroken):
            await learner.install(0, members, timeout_s=0.1)
        await it.desk.reported("node-a", job_id, "running")
        assert (await learner.ledger.counts()).issued == 40
        await learner.install(0, members)
        assert len(await learner.take(0)) == BATCH


async def test_a_kept_engine_serves_the_next_job_only_with_its_weights(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        first, second = it.learner(job_id), it.learner(f"{job_id}-2")
        await first.open(lag=0)
        await second.open(lag=0)
        it.assign(first.job_id, lag=0)
        await it.node("node-a", lengths="constant:4000")
        members = await first.members(1)
        await first.install(0, members)
        await first.sampled(members, 1)
        it.desk.assign(first.job_id, spec_json(lag=0), cancel=True)
        await it.desk.reported("node-a", first.job_id, "cancelled")
        counts = await first.ledger.counts()
        assert (counts.leased, counts.issued) == (0, 40)
        assert await first.ledger.members() == ()
        del it.desk.assignments[first.job_id]
        it.assign(second.job_id, lag=0)
        [member] = await second.members(1)
        assert member.version is None
        status = await second.status(member)
        assert status.num_tokens_sampled > 0  # the engine is the same
        assert status.job_id == second.job_id and not status.HasField("version")
        assert (await second.ledger.counts()).issued == 40
        await second.install(0, [member])
        await second.until(lambda c: c.leased == BATCH)


async def test_s055_failing_graders_filter_the_group_and_say_why(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=0)
        grader = {"type": "numeric", "reference": "{{item.missing}}"}
        it.assign(job_id, lag=0, grader=grader, on_error="fail")
        await it.node("node-a", rate="2000")
        await learner.install(0, await learner.members(1))
        counts = await learner.until(lambda c: c.filtered >= BATCH)
        [reason] = counts.reasons
        assert reason.startswith("reward_error:")
        assert (counts.delivered, counts.taken, counts.payload_bytes) == (0, 0, 0)
        [event] = await Journal(it.redis, job_id).read_events()
        assert event["kind"] == "reward_errors" and event["policy"] == "fail"
        assert event["error_kind"] == reason.partition(":")[2]


async def test_nothing_is_lost_while_redis_is_away(reward, job_id, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # one that the server has again after its restart
    server = EmbeddedValkey(tmp_path, port)
    await asyncio.to_thread(server.start)
    try:
        async with house(server.url, reward) as it:
            learner = it.learner(job_id)
            await learner.open(lag=0)
            it.assign(job_id, lag=0)
            node = await it.node("node-a")
            await learner.install(0, await learner.members(1))
            await learner.until(lambda c: c.leased == BATCH)
            await asyncio.to_thread(server.stop)
            async with asyncio.timeout(20):
                # sampled and scored, and nobody to deliver to
                while not any("trying again" in row["message"] for row in node.log):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(server.start)
            groups = await learner.take(0)
            assert [g.attempt for g in groups] == [1] * BATCH
            counts = await learner.ledger.counts()
            assert (counts.expired_leases, counts.refused_deliveries) == (0, 0)
    finally:
        await asyncio.to_thread(server.stop)


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


def refused(*flags, redis_url="redis://127.0.0.1:1/0"):
    done = subprocess.run(
        [sys.executable, "-m", "services.rollout", *flags, "--redis", redis_url],
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
