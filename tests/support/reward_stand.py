"""A reward service in this process with real worker processes, and a client to it."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headway import graders
from headway.lifecycle import Lifecycle
from headway.messages import ScoreItem
from headway.reward_client import RewardClient
from services.reward.request import ServiceLimits
from services.reward.serve import reward_server
from services.reward.workers import PoolSettings
from tests.support.hostile_graders import Hostile, HostileGroup

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
    monkeypatch.setitem(graders.GRADERS, "hostile_group", HostileGroup)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return PoolSettings(
        num_workers=1, memory_bytes=512 << 20, imports=("tests.support.hostile_graders",)
    )


@asynccontextmanager
async def service(pool=None, limits=None, asking=None):
    pool = pool or PoolSettings(num_workers=1)
    limits = limits or ServiceLimits()
    where = ("127.0.0.1", 0, 0)
    async with reward_server(*where, pool, limits, Lifecycle(), asking=asking) as server:
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
