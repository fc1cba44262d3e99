"""The ledgers that the contract suites run over."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headway.ledger.api import Ledger
from headway.redis_client import connect
from tests.support.ledgers import MemoryStand, RedisStand, Stand


@pytest_asyncio.fixture(params=["memory", "valkey", "redis"])
async def stand(request: pytest.FixtureRequest, job_id: str) -> AsyncIterator[Stand]:
    """A ledger that nobody opened yet, of each kind."""
    if request.param == "memory":
        yield MemoryStand()
        return
    client = connect(request.getfixturevalue(f"{request.param}_url"))
    yield RedisStand(client, job_id)
    await client.aclose()


@pytest.fixture
def ledger(stand: Stand) -> Ledger:
    """The ledger of the stand."""
    return stand.ledger
