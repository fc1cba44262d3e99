"""Tokens, roles and the gate; settings that would leave a door open."""

import argparse
import json
import os
import time
from pathlib import Path

import pytest

from headway.access.gate import Gate
from headway.access.identity import own_token
from headway.access.process import process_access
from headway.access.roles import ANY_ROLE, ROLES, grpc_roles, http_roles
from headway.access.secrets import check_no_password, read_secret, write_secret
from headway.access.tokens import TOKEN, TokenFile, add_token, new_token, parse_lifetime
from headway.cli import run_command
from headway.errors import Forbidden, InvalidSpec, NotFound, Unauthorized
from headway.ports import checked_address
from headway.settings import add_service_flags, service_settings


@pytest.fixture
def file(tmp_path):
    return TokenFile(tmp_path / "tokens.json")


def header(token: str) -> str:
    return f"Bearer {token}"


# -- tokens at rest --------------------------------------------------------------------


def test_only_a_hash_is_kept_and_only_for_its_owner(file):
    token, record = add_token(file, "user", "alice")
    assert TOKEN.fullmatch(token)[1] == record.token_id
    text = file.path.read_text()
    assert token not in text and token.split("_")[2] not in text
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.read() == (record,)
    assert len({new_token("user", "a", 0.0)[0] for _ in range(100)}) == 100


def test_revoking_and_replacing(file):
    first, kept = add_token(file, "admin", "local", only=True)
    second, record = add_token(file, "admin", "local", only=True)
    assert file.read() == (record,) and first != second
    with pytest.raises(NotFound, match=kept.token_id):
        file.revoke(kept.token_id)
    assert file.revoke(record.token_id) == record
    assert file.read() == ()


def test_a_damaged_token_file_is_refused(file):
    _, record = add_token(file, "user", "alice")
    rows = json.loads(file.path.read_text())
    for faulty in (
        b"", b"{", b"[]", b"[" * 100_000, b'{"format": 2, "tokens": []}', b"\xff",
        *(json.dumps({"format": 1, "tokens": [{**rows["tokens"][0], **change}]}).encode()
          for change in ({"role": "root"}, {"sha256": "00"}, {"x": 1}, {"expires_at": "soon"},
                         {"token_id": 3})),
    ):  # fmt: skip
        file.path.write_bytes(faulty)
        with pytest.raises(InvalidSpec, match="token file"):
            file.read()
    write_secret(file.path, json.dumps(rows))
    assert file.read() == (record,)
    file.path.chmod(0o620)
    with pytest.raises(InvalidSpec, match="may be changed by others"):
        file.read()


def test_a_secret_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "token"
    write_secret(path, "x\n")
    assert read_secret(path, "the token file") == "x"
    for mode in (0o604, 0o640, 0o666):
        path.chmod(mode)
        with pytest.raises(InvalidSpec, match="is open to others"):
            read_secret(path, "the token file")
    with pytest.raises(InvalidSpec, match="No such file"):
        read_secret(tmp_path / "none", "the token file")


def test_spans_of_time():
    assert [parse_lifetime(t) for t in ("45s", "30m", "12h", "90d")] == [45, 1800, 43200, 7776000]
    for faulty in ("", "0d", "1w", "-1d", "1.5h", "d"):
        with pytest.raises(InvalidSpec, match="no span of time"):
            parse_lifetime(faulty)


# -- the gate --------------------------------------------------------------------------


def test_each_role_opens_its_own_doors():
    def may(roles) -> set[str]:
        return set(ROLES if roles is None else roles)

    assert may(http_roles("GET", "/healthz")) == may(ANY_ROLE)
    assert may(http_roles("GET", "/v1/jobs")) == {"viewer", "user", "admin"}
    assert may(http_roles("GET", "/metrics")) == {"viewer", "user", "admin"}
    assert may(http_roles("POST", "/v1/jobs")) == {"user", "admin"}
    assert may(http_roles("POST", "/v1/score")) == {"service", "user", "admin"}
    assert may(http_roles("DELETE", "/anything")) == {"user", "admin"}
    for service in ("FleetService", "RolloutService", "LearnerService", "Unheard"):
        assert may(grpc_roles(f"/headway.v1.{service}/X")) == {"service", "admin"}
    assert may(grpc_roles("/headway.v1.RewardService/Score")) == {"service", "user", "admin"}
    assert grpc_roles("/grpc.health.v1.Health/Check") is None


def test_the_gate_knows_whom_it_lets_in(file):
    tokens = {role: add_token(file, role, f"a {role}")[0] for role in ROLES}
    gate = Gate(file.path)
    for role, token in tokens.items():
        caller = gate.admit(header(token), ANY_ROLE, "test")
        assert (caller.role, caller.name) == (role, f"a {role}")
    assert gate.admit(f"bearer  {tokens['user']}", ANY_ROLE, "test").role == "user"
    with pytest.raises(Forbidden, match="viewer may not do this"):
        gate.admit(header(tokens["viewer"]), frozenset({"user"}), "test")
    token = tokens["user"]
    other_secret = token[:-1] + ("A" if token[-1] != "A" else "B")
    other_id = "hw_00000000" + token[11:]
    for faulty in (None, "", "Bearer", token, f"Basic {token}", header(""), header(other_secret),
                   header(other_id), header(token + "x"), header("\xff" * 50)):  # fmt: skip
        with pytest.raises(Unauthorized):
            gate.admit(faulty, ANY_ROLE, "test")


def test_an_expired_and_a_revoked_token_are_refused(file, monkeypatch):
    passing, _ = add_token(file, "user", "bob", lifetime_s=60.0)
    staying, record = add_token(file, "user", "alice")
    gate = Gate(file.path)
    gate.admit(header(passing), ANY_ROLE, "test")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    with pytest.raises(Unauthorized):
        gate.admit(header(passing), ANY_ROLE, "test")
    gate.admit(header(staying), ANY_ROLE, "test")
    file.revoke(record.token_id)
    begun = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begun + 2)
    with pytest.raises(Unauthorized):
        gate.admit(header(staying), ANY_ROLE, "test")


def test_a_token_file_that_breaks_lets_nobody_in_but_the_fleet(file, monkeypatch):
    token, _ = add_token(file, "user", "alice")
    own, _ = new_token("service", "fleet", 0.0)
    gate = Gate(file.path, own)
    gate.admit(header(token), ANY_ROLE, "test")
    file.path.unlink()
    begun = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begun + 2)
    with pytest.raises(Unauthorized):
        gate.admit(header(token), ANY_ROLE, "test")
    assert gate.admit(header(own), ANY_ROLE, "test").role == "service"


# -- a process's settings --------------------------------------------------------------


@pytest.fixture
def settings(monkeypatch):
    for name in [n for n in os.environ if n.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)

    def settings(*flags: str, role: str = "reward"):
        parser = argparse.ArgumentParser()
        add_service_flags(parser, role)
        return service_settings(parser.parse_args(flags))

    return settings


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", "169.254.1.1"])
def test_beyond_loopback_only_with_a_token(settings, tmp_path, host):
    with pytest.raises(InvalidSpec, match="is not a loopback address: without --tokens"):
        settings("--host", host)
    write_secret(tmp_path / "token", new_token("service", "x", 0.0)[0])
    assert settings("--host", host, "--token-file", str(tmp_path / "token")).host == host


def test_what_is_told_to_the_fleet(settings, tmp_path):
    write_secret(tmp_path / "token", new_token("service", "x", 0.0)[0])
    token = ("--token-file", str(tmp_path / "token"))
    assert settings().advertise == "127.0.0.1"
    assert settings(*token, "--host", "10.1.2.3").advertise == "10.1.2.3"
    everywhere = (*token, "--host", "0.0.0.0")
    assert settings(*everywhere, "--coordinator", "127.0.0.1:99").advertise == "127.0.0.1"
    assert settings(*everywhere, "--advertise", "node-7.lan").advertise == "node-7.lan"
    for faulty in ("0.0.0.0", "a b", "a/b", "http://x"):
        with pytest.raises(InvalidSpec, match="--advertise"):
            settings(*everywhere, "--advertise", faulty)


def test_a_processs_token_comes_from_its_environment_or_a_private_file(tmp_path):
    token, _ = new_token("service", "x", 0.0)
    path = tmp_path / "token"
    write_secret(path, token + "\n")
    assert own_token({}) == ""
    assert own_token({"HEADWAY_TOKEN": token}) == token
    assert own_token({"HEADWAY_TOKEN": "", "HEADWAY_TOKEN_FILE": str(path)}) == token
    with pytest.raises(InvalidSpec, match="HEADWAY_TOKEN holds no Headway token"):
        own_token({"HEADWAY_TOKEN": "secret"})
    access = process_access({"HEADWAY_TOKEN": token})
    assert access.gate is not None and token not in repr(access)
    assert process_access({}).gate is None


def test_a_password_on_the_command_line_is_refused():
    for fine in ("redis://127.0.0.1:6379/0", "redis://user@h", "rediss://h?ssl_ca_certs=/x"):
        check_no_password(fine)
    for seen in ("redis://:pw@h", "redis://u:pw@h:1/0", "redis://h?password=pw", "u:pw@h"):
        with pytest.raises(InvalidSpec, match="HEADWAY_REDIS_URL") as caught:
            check_no_password(seen)
        assert "pw" not in str(caught.value).replace("password", "")


def test_an_address_is_host_and_port_and_nothing_else():
    for fine in ("127.0.0.1:1", "[::1]:80", "node-1.rack_2:65535", "localhost:50051"):
        assert checked_address(fine) == fine
    for faulty in ("", "h", ":1", "h:0", "h:65536", "h:x", "unix:/run/x.sock", "dns:///h:1",
                   "http://h:1", "h:1/x", "h@g:1", "a..b:1", "h:１", "h:1\n",
                   "-" * 300 + ":1"):  # fmt: skip
        with pytest.raises(InvalidSpec, match="no address"):
            checked_address(faulty)


# -- the command -----------------------------------------------------------------------


def test_the_command_makes_lists_and_revokes(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HEADWAY_TOKENS", raising=False)
    path = str(tmp_path / "deep" / "tokens.json")
    assert run_command(["token", "create", "--name", "ci", "--expires", "1h", "--file", path]) == 0
    token = capsys.readouterr().out.strip()
    assert Gate(Path(path)).admit(header(token), ANY_ROLE, "test").role == "user"
    out = tmp_path / "service.token"
    create = ["token", "create", "--role", "service", "--name", "n", "--file", path]
    assert run_command([*create, "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert out.stat().st_mode & 0o777 == 0o600
    assert run_command(["token", "list", "--file", path, "--json"]) == 0
    listed = capsys.readouterr().out
    assert [row["role"] for row in json.loads(listed)] == ["user", "service"]
    assert "sha256" not in listed
    token_id = token.split("_")[1]
    assert run_command(["token", "revoke", token_id, "--file", path]) == 0
    assert run_command(["token", "revoke", token_id, "--file", path]) == 2
    assert f"there is no token '{token_id}'" in capsys.readouterr().err
    with pytest.raises(Unauthorized):
        Gate(Path(path)).admit(header(token), ANY_ROLE, "test")
    assert run_command(["token", "create", "--name", "a/b", "--file", path]) == 2
