"""Real job stores for tests: the embedded Valkey and Debian's redis-server.

Each is started once a session. Tests keep apart by their job ids (`job_id`).
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.valkey import EmbeddedValkey


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an embedded Valkey."""
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a redis-server 7, run the same way; its absence is an error."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise RuntimeError("redis-server is not installed: apt-get install -y redis-server")
    with EmbeddedValkey(tmp_path_factory.mktemp("redis"), binary=Path(binary)) as server:
        yield server.url


@pytest.fixture(params=["valkey", "redis"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Each kind of server in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def job_id() -> str:
    """A job of this test's own."""
    return f"test-{uuid.uuid4().hex[:12]}"
