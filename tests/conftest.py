"""Fixtures for all tests."""

import os
from collections.abc import Iterator

import pytest

from tests.support.redis_servers import job_id, redis_url, store_url, valkey_url

__all__ = ["job_id", "redis_url", "store_url", "valkey_url"]


@pytest.fixture(autouse=True, scope="module")
def _own_environment() -> Iterator[None]:
    """What a module's tests set (vLLM preloads libraries) is not passed on to the next."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
