"""TLS with real servers: gRPC is mutual, HTTP shows the server's certificate."""

import asyncio
import os
import ssl
import subprocess
import sys

import grpc
import httpx
import pytest
import trustme

from headway.access.process import Access
from headway.access.tls import FOLDER_NAMES, TlsFiles, tls_files
from headway.access.tokens import TokenFile, add_token
from headway.client import HeadwayClient
from headway.errors import InvalidSpec, Unavailable
from headway.pb import fleet_pb2, fleet_pb2_grpc
from headway.rpc import channel
from tests.support.fleet import CoordinatorProcess, eventually, own_db

FLEET_NAME = "fleet.headway.example"


def write(folder, ca: trustme.CA, *names: str):
    """A folder as --tls-dir wants it."""
    folder.mkdir()
    pair = ca.issue_cert(*names)
    cert, key, root = (folder / name for name in FOLDER_NAMES)
    cert.write_bytes(b"".join(pem.bytes() for pem in pair.cert_chain_pems))
    key.write_bytes(pair.private_key_pem.bytes())
    key.chmod(0o600)
    ca.cert_pem.write_to_path(root)
    return folder


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    base = tmp_path_factory.mktemp("tls")
    ours, theirs = trustme.CA(), trustme.CA()
    write(base / "here", ours, "127.0.0.1")
    write(base / "named", ours, FLEET_NAME)
    write(base / "stranger", theirs, "127.0.0.1")
    return base


def start(store: str, base, folder: str) -> CoordinatorProcess:
    return CoordinatorProcess(
        store, "--tokens", str(base / "tokens.json"), "--tls-dir", str(base / folder)
    )


@pytest.fixture(scope="module")
def tokens(certificates):
    file = TokenFile(certificates / "tokens.json")
    return {role: add_token(file, role, role)[0] for role in ("service", "viewer")}


@pytest.fixture(scope="module")
def coordinator(redis_url, certificates, tokens):
    process = start(own_db(redis_url), certificates, "here")
    yield process
    process.kill()


async def beat(address: str, access: Access) -> str:
    async with channel(address, access) as link:
        try:
            request = fleet_pb2.HeartbeatRequest(node_id="n")
            await fleet_pb2_grpc.FleetServiceStub(link).Heartbeat(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


async def test_grpc_believes_only_certificates_of_the_fleet(coordinator, certificates, tokens):
    address, token = coordinator.grpc_address, tokens["service"]
    ours = tls_files(str(certificates / "here"))
    assert await beat(address, Access(token=token, tls=ours)) == "OK"
    assert await beat(address, Access(tls=ours)) == "UNAUTHENTICATED"
    assert await beat(address, Access(token=token)) == "UNAVAILABLE"  # plain text
    stranger = tls_files(str(certificates / "stranger"))
    assert await beat(address, Access(token=token, tls=stranger)) == "UNAVAILABLE"
    # one that believes the fleet, but shows a certificate that the fleet does not believe
    mixed = TlsFiles(stranger.cert, stranger.key, ours.ca)
    assert await beat(address, Access(token=token, tls=mixed)) == "UNAVAILABLE"
    without = grpc.ssl_channel_credentials(ours.ca.read_bytes())
    async with grpc.aio.secure_channel(address, without) as link:
        stub = fleet_pb2_grpc.FleetServiceStub(link)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Heartbeat(fleet_pb2.HeartbeatRequest(node_id="n"), timeout=5)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_http_is_encrypted_and_its_certificate_checked(
    coordinator, certificates, tokens, monkeypatch
):
    assert coordinator.url.startswith("https://")
    monkeypatch.setenv("HEADWAY_TLS_CA", str(certificates / "here" / "ca.crt"))
    with HeadwayClient(coordinator.url, tokens["viewer"]) as client:
        assert client.fleet() == {"nodes": []}
    monkeypatch.setenv("HEADWAY_TLS_CA", str(certificates / "stranger" / "ca.crt"))
    client = HeadwayClient(coordinator.url, tokens["viewer"])
    with client, pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
        client.fleet()
    plain = coordinator.url.replace("https", "http")
    with pytest.raises(httpx.TransportError):
        httpx.get(plain + "/healthz")


async def test_a_service_joins_by_name_over_tls(redis_url, certificates, tokens, monkeypatch):
    """A certificate for the whole fleet: made out to a name, not to addresses."""
    process = start(own_db(redis_url, 6), certificates, "named")
    env = {**os.environ, "HEADWAY_TOKEN": tokens["service"], "HEADWAY_TLS_NAME": FLEET_NAME}
    reward = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "services.reward", "--workers", "1", "--node-id", "graders",
         "--coordinator", process.grpc_address, "--tls-dir", str(certificates / "named")],
        env=env, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        believed = ssl.create_default_context(cafile=certificates / "named" / "ca.crt")
        bearer = {"Authorization": f"Bearer {tokens['viewer']}", "Host": FLEET_NAME}
        async with httpx.AsyncClient(base_url=process.url, verify=believed, headers=bearer) as http:

            async def joined():
                answer = await http.get("/v1/fleet", extensions={"sni_hostname": FLEET_NAME})
                return answer.json()["nodes"] or None

            (node,) = await eventually(joined)
        assert (node["node_id"], node["http_address"][:8]) == ("graders", "https://")
    finally:
        for one in (reward, process):
            one.kill()
        await reward.wait()


def test_files_that_cannot_be_used_are_named(certificates, tmp_path):
    here = certificates / "here"
    cert, key, ca = (str(here / name) for name in FOLDER_NAMES)
    assert tls_files() is None
    assert tls_files(cert=cert, key=key, ca=ca, name="x").name == "x"
    assert (
        tls_files(str(here), ca=str(certificates / "stranger" / "ca.crt")).cert == here / "tls.crt"
    )
    other = str(certificates / "stranger" / "tls.key")
    nowhere, rubbish = str(tmp_path / "none.pem"), tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    rubbish.chmod(0o600)
    for arguments, said in (
        ({"cert": cert}, "TLS needs all of"),
        ({"folder": str(tmp_path)}, "tls.key: No such file"),
        ({"folder": str(here), "key": other}, r"tls\.crt with .*MISMATCH"),
        ({"folder": str(here), "ca": nowhere}, "there is no file .*none.pem"),
        ({"folder": str(here), "ca": str(rubbish)}, "rubbish.pem holds no certificates"),
        ({"folder": str(here), "key": str(rubbish)}, "rubbish.pem"),
    ):
        with pytest.raises(InvalidSpec, match=said):
            tls_files(**arguments)
    open_key = tmp_path / "open.key"
    open_key.write_bytes((here / "tls.key").read_bytes())
    open_key.chmod(0o644)
    with pytest.raises(InvalidSpec, match=r"TLS key .* is open to others"):
        tls_files(str(here), key=str(open_key))
