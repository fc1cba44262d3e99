"""Every door of a fleet with tokens: who gets in over HTTP and gRPC, and what the rest hear."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from fastapi import FastAPI, Request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headway.access.gate import Gate
from headway.access.process import Access
from headway.access.tokens import TokenFile, add_token
from headway.client import AsyncHeadwayClient, HeadwayClient
from headway.errors import Forbidden, NoCapacity, Unauthorized
from headway.pb import fleet_pb2, fleet_pb2_grpc, types_pb2
from headway.ports import free_port
from headway.rpc import channel
from headway.web import make_app, serve_http
from tests.support.fleet import SPEC, CoordinatorProcess, emptied, eventually, own_db

ROOT = Path(__file__).parents[2]
ROLES = ("admin", "user", "viewer", "service")
NODE = fleet_pb2.Node(
    node_id="n1", role=types_pb2.ROLE_ROLLOUT, address="127.0.0.1:1", software_version="x"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def tokens(folder):
    file = TokenFile(folder / "tokens.json")
    return {role: add_token(file, role, role)[0] for role in ROLES}


@pytest.fixture(scope="module")
def coordinator(redis_url, folder, tokens):
    process = CoordinatorProcess(
        own_db(redis_url), "--lost-after-s", "60", "--tokens", str(folder / "tokens.json")
    )
    yield process
    process.kill()


@pytest.fixture
async def store(redis_url):
    async with emptied(own_db(redis_url)) as client:
        yield client


async def register(address: str, token: str) -> str:
    """The status of a call of FleetService."""
    async with channel(address, Access(token=token)) as link:
        try:
            request = fleet_pb2.RegisterRequest(node=NODE)
            await fleet_pb2_grpc.FleetServiceStub(link).Register(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


async def test_the_rest_api_asks_for_a_token_and_its_role(coordinator, tokens, store):
    spec = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=coordinator.url) as http:
        for path in ("/v1/jobs", "/v1/fleet", "/metrics", "/v1/jobs/x/stream", "/nothing"):
            answer = await http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["kind"] == "unauthorized"
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/healthz", "/readyz", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
        expected = {"admin": (200, 503), "user": (200, 503), "viewer": (200, 403),
                    "service": (403, 403)}  # fmt: skip
        for role, token in tokens.items():
            bearer = {"Authorization": f"Bearer {token}"}
            read = await http.get("/v1/jobs", headers=bearer)
            wrote = await http.post("/v1/jobs", headers={**bearer, **spec}, json=SPEC)
            assert (read.status_code, wrote.status_code) == expected[role], role


async def test_the_client_shows_its_token(coordinator, tokens, store, monkeypatch):
    with HeadwayClient(coordinator.url, tokens["viewer"]) as client:
        assert client.jobs() == []
        with pytest.raises(Forbidden, match="role viewer may not do this"):
            client.submit(SPEC)
    with pytest.raises(Unauthorized, match="HEADWAY_TOKEN"), HeadwayClient(coordinator.url) as c:
        c.jobs()
    monkeypatch.setenv("HEADWAY_TOKEN", tokens["user"])
    async with AsyncHeadwayClient(coordinator.url) as client:
        with pytest.raises(NoCapacity):
            await client.submit(SPEC)


async def test_the_fleet_service_is_for_the_fleet(coordinator, tokens):
    address = coordinator.grpc_address
    got = {role: await register(address, token) for role, token in tokens.items()}
    assert got == {"admin": "OK", "service": "OK", "user": "PERMISSION_DENIED",
                   "viewer": "PERMISSION_DENIED"}  # fmt: skip
    assert await register(address, "") == "UNAUTHENTICATED"
    assert await register(address, tokens["admin"][:-1]) == "UNAUTHENTICATED"
    async with channel(address) as link:
        twice = [("authorization", f"Bearer {tokens[role]}") for role in ("service", "admin")]
        stub = fleet_pb2_grpc.FleetServiceStub(link)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Heartbeat(fleet_pb2.HeartbeatRequest(), timeout=5, metadata=twice)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(link)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        talk = reflection_pb2_grpc.ServerReflectionStub(link).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(talk))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    async with channel(address, Access(token=tokens["viewer"])) as link:
        talk = reflection_pb2_grpc.ServerReflectionStub(link).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        listed = [s.name for s in (await anext(aiter(talk))).list_services_response.service]
        assert "headway.v1.FleetService" in listed


async def test_a_revoked_token_is_refused_by_a_running_service(coordinator, folder):
    file = TokenFile(folder / "tokens.json")
    token, record = add_token(file, "viewer", "passing")
    async with AsyncHeadwayClient(coordinator.url, token) as client:
        await eventually(lambda: admitted(client, True))
        file.revoke(record.token_id)
        await eventually(lambda: admitted(client, False))


async def admitted(client, wanted) -> bool:
    try:
        await client.jobs()
    except Unauthorized:
        return not wanted
    return wanted


async def test_refusals_are_counted_and_no_token_is_logged(coordinator, tokens):
    async with AsyncHeadwayClient(coordinator.url, "hw_0_not-a-token") as client:
        with pytest.raises(Unauthorized):
            await client.jobs()
    bearer = {"Authorization": f"Bearer {tokens['viewer']}"}
    async with httpx.AsyncClient(base_url=coordinator.url, headers=bearer) as http:
        assert (
            'headway_refused_calls_total{door="http",reason="unauthorized"}'
            in (await http.get("/metrics")).text
        )
    text = json.dumps(coordinator.log)
    assert not any(token in text for token in tokens.values())


# -- what the doors measure ------------------------------------------------------------


def served(gate: Gate | None = None) -> FastAPI:
    app = make_app("test", lambda: True, max_body_bytes=100, access=Access(gate))
    app.state.seen = 0

    @app.post("/v1/swallow")
    async def swallow(request: Request) -> dict[str, int]:
        async for chunk in request.stream():
            app.state.seen += len(chunk)
        return {"size": app.state.seen}

    @app.post("/v1/parse")
    async def parse(body: dict[str, int]) -> dict[str, int]:
        return body

    return app


@asynccontextmanager
async def http_to(app: FastAPI):
    async with (
        serve_http(app, "127.0.0.1", 0) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        yield http


async def test_a_body_is_read_to_its_limit_and_no_further():
    app = served()

    async def drip(count: int):
        for _ in range(count):
            yield b"x" * 30

    async with http_to(app) as http:
        assert (await http.post("/v1/swallow", content=drip(3))).json() == {"size": 90}
        app.state.seen = 0
        too_long = await http.post("/v1/swallow", content=drip(1000))
        assert too_long.status_code == 413
        assert too_long.json()["error"]["kind"] == "invalid"
        assert app.state.seen == 90
        for path in ("/v1/swallow", "/v1/parse"):
            app.state.seen = 0
            declared = await http.post(path, content=b"x" * 101)
            assert (declared.status_code, app.state.seen) == (413, 0)
            chunked = await http.post(path, content=drip(50))
            assert chunked.status_code == 413


async def raw(port: int, head: str, body: bytes = b"") -> bytes:
    """The status line of the answer to a request as it stands."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n" + body)
    line = await asyncio.wait_for(reader.readline(), 20)
    writer.close()
    return line.split()[1]


async def test_heads_that_contradict_themselves(folder, tokens):
    app = served(Gate(folder / "tokens.json"))
    post = "POST /v1/swallow HTTP/1.1\nHost: a\n"
    good, bad = f"Authorization: Bearer {tokens['user']}\n", "Authorization: Bearer bad\n"
    chunks = b"5000\r\n" + b"x" * 0x5000 + b"\r\n0\r\n\r\n"
    async with serve_http(app, "127.0.0.1", 0) as port:
        assert await raw(port, post + good + "Content-Length: 0\n") == b"200"
        for two in (good + bad, bad + good, good + good):
            assert await raw(port, post + two + "Content-Length: 0\n") == b"401"
        both = "Content-Length: 3\nTransfer-Encoding: chunked\n"
        assert await raw(port, post + good + both, chunks) == b"413"
        for path in (
            "/healthz/../metrics",
            "http://x/metrics",
            "/healthz%2f..%2fmetrics",
            "//healthz",
        ):
            assert await raw(port, f"GET {path} HTTP/1.1\nHost: a\n") == b"401"
        for head in ("X: " + "y" * 200_000 + "\n", "X: y\n" * 50_000):
            assert await raw(port, f"GET /healthz HTTP/1.1\nHost: a\n{head}") == b"400"


async def test_without_tokens_a_page_on_the_web_gets_nothing():
    app = served()
    async with http_to(app) as http:
        port = http.base_url.port
        for headers, status in (
            ({}, 200),
            ({"Host": f"localhost:{port}"}, 200),
            ({"Origin": f"http://127.0.0.1:{port}"}, 200),
            ({"Host": "rebound.example.org"}, 403),
            ({"Host": f"127.0.0.1.example.org:{port}"}, 403),
            ({"Host": "[::1"}, 403),
            ({"Origin": "https://example.org"}, 403),
            ({"Origin": "null"}, 403),
        ):
            answer = await http.post("/v1/swallow", content=b"", headers=headers)
            assert answer.status_code == status, headers


def test_the_ranks_of_a_job_meet_on_loopback_only():
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.seated", rank, port],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert said == ["['127.0.0.1'] 41", "['127.0.0.1'] 41"]
