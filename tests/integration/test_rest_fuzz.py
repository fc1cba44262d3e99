"""The REST APIs under requests at random: no crash, no 500, and answers as OpenAPI says."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import redis
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    ignored_auth,
    negative_data_rejection,
    positive_data_acceptance,
)

from headway.access.tokens import TokenFile, add_token
from headway.client import HeadwayClient
from tests.support.fleet import SPEC, CoordinatorProcess, own_db

# Of what schemathesis checks, not: a 503 is right here when the fleet lacks something; and a
# schema cannot say all of a job's rules; and every request here bears a good token.
EXCLUDED = [
    not_a_server_error, ignored_auth, negative_data_rejection, positive_data_acceptance
]  # fmt: skip
SEEN: Counter[tuple[str, int]] = Counter()  # operation and status of the answers so far
FUZZ = settings(
    max_examples=int(os.environ.get("HEADWAY_FUZZ_EXAMPLES", "25")),
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def admin(tmp_path_factory):
    """A token file and a token of it."""
    file = TokenFile(tmp_path_factory.mktemp("fuzz") / "tokens.json")
    return str(file.path), add_token(file, "admin", "fuzz")[0]


def opened(url: str, token: str):
    headers = {"Authorization": f"Bearer {token}"}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    schema.config.update(headers=headers)
    return schema


@pytest.fixture(scope="module")
def coordinator(redis_url, admin):
    blocking = redis.Redis.from_url(own_db(redis_url))
    blocking.flushdb()
    process = CoordinatorProcess(own_db(redis_url), "--lost-after-s", "60", "--tokens", admin[0])
    yield opened(process.url, admin[1])
    process.kill()


@pytest.fixture(scope="module")
def reward(admin):
    process = subprocess.Popen(
        [sys.executable, "-m", "services.reward", "--workers", "1", "--tokens", admin[0]],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if found := re.search(r"http://[0-9.:]+", line):
            break
    yield opened(found[0], admin[1])
    process.kill()
    process.communicate()


def check(case) -> None:
    answer = case.call()
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    SEEN[case.operation.label, answer.status_code] += 1
    case.validate_response(answer, excluded_checks=EXCLUDED)


def fuzz(schema, job_id: str = "") -> None:
    """Sends requests at random to every operation; with `job_id` to those on jobs, on that one."""
    for found in schema.get_all_operations():
        operation = found.ok()
        if job_id and "{job_id}" not in operation.path:
            continue

        def send(case) -> None:
            if job_id:
                case.path_parameters["job_id"] = job_id
            check(case)

        FUZZ(given(case=operation.as_strategy())(send))()


def test_the_coordinator(coordinator, admin):
    SEEN.clear()
    fuzz(coordinator)
    assert SEEN["POST /v1/jobs", 422] and SEEN["GET /v1/jobs/{job_id}", 404]
    with HeadwayClient(coordinator.get_base_url(), admin[1]) as client:
        client.submit(SPEC, "known", queue=True)
        client.cancel("known")  # its streams end
    fuzz(coordinator, "known")
    for path in ("", "/events", "/metrics", "/stream"):
        assert SEEN[f"GET /v1/jobs/{{job_id}}{path}", 200]


def test_the_reward_service(reward):
    SEEN.clear()
    fuzz(reward)
    assert SEEN["POST /v1/score", 200] and SEEN["POST /v1/score", 422]
