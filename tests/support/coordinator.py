"""Fixtures of the tests that talk to a coordinator: its process, its Redis, clients and nodes."""

import httpx
import pytest

from headway.client import AsyncHeadwayClient
from tests.support.fleet import (
    CoordinatorProcess,
    ScriptedNode,
    emptied,
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
