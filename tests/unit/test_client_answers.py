"""A client before something that is no coordinator, or behind a proxy."""

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headway.access.process import Access
from headway.client import HeadwayClient
from headway.errors import HeadwayError, InvalidSpec, Unavailable
from headway.rest import client_options
from headway.rpc import channel, grpc_server

URL = "http://coordinator.lan:8700"


def answering(**answer: object) -> HeadwayClient:
    return HeadwayClient(URL, "", httpx.MockTransport(lambda _: httpx.Response(200, **answer)))


@pytest.mark.parametrize(
    "answer",
    [
        {"text": "<html>"},
        {"json": []},
        {"json": {}},
        {"json": {"jobs": 5, "next_after": ""}},
        {"json": {"jobs": [{"job_id": "j"}], "rows": [7], "next_after": ""}},
        {"json": {"jobs": [None], "rows": "x", "next_after": ""}},
        {"content": b"\x00", "headers": {"Content-Encoding": "gzip"}},
    ],
)
def test_what_is_no_coordinator_is_told_so(answer):
    client = answering(**answer)
    for call in (client.jobs, lambda: client.job("j"), lambda: client.cancel("j"),
                 lambda: client.events("j"), lambda: client.metrics("j")):  # fmt: skip
        with pytest.raises(Unavailable, match="coordinator"):
            call()


@pytest.mark.parametrize("stream", ["event: event\n\n", "event: metrics\nid: 1\ndata: [1\n\n"])
def test_a_stream_that_is_none(stream):
    client = answering(text=stream)
    with pytest.raises(Unavailable):
        list(client.follow("j", patience_s=-1.0))


@pytest.mark.parametrize(
    "url", ["", "localhost:8700", "ftp://x", "http://", "http://h:99999", "http://[::1", "//h"]
)
def test_urls_that_lead_nowhere(url):
    with pytest.raises(InvalidSpec, match="is not the URL of a coordinator"):
        HeadwayClient(url, "")


def test_a_proxy_is_for_other_machines():
    assert not client_options("http://127.0.0.1:8700", "")["trust_env"]
    assert not client_options("http://localhost:8700", "")["trust_env"]
    assert client_options(URL, "")["trust_env"]


async def test_no_proxy_stands_between_services(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with (
        grpc_server("127.0.0.1", 0, lambda _: (), access=Access()) as port,
        channel(f"127.0.0.1:{port}", Access()) as link,
    ):
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(link).Check(request, timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_an_error_of_the_coordinator_stays_what_it_is():
    transport = httpx.MockTransport(
        lambda _: httpx.Response(409, json={"error": {"kind": "conflict", "message": "no"}})
    )
    with pytest.raises(HeadwayError, match=r"^no$") as caught:
        HeadwayClient(URL, "", transport).jobs()
    assert caught.value.kind == "conflict"
