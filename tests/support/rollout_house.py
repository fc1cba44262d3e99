"""Rollout nodes as processes around a desk, a Valkey and a reward service; the learner's side."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from headway.ledger.api import LedgerConfig
from headway.ledger.redis_ledger import RedisLedger
from headway.messages import Ticket, WeightManifest
from headway.payloads import unpack_group
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.redis_client import connect
from headway.rpc import channel
from headway.weights.members import MemberClient
from tests.support.desk import Service, desk

BATCH = 4
N = 4
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
