"""The embedded Valkey: its secrets, its data, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from headway.errors import Conflict, Unauthorized, Unavailable
from headway.redis_client import command, connect, ping
from headway.valkey import EmbeddedValkey


async def ask(url: str, *parts: str):
    client = connect(url)
    try:
        return await command(client, *parts)
    finally:
        await client.aclose()


@pytest.fixture
def server(tmp_path):
    with EmbeddedValkey(tmp_path / "data") as server:
        yield server


def port_of(server: EmbeddedValkey) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])


async def test_it_answers_and_persists_every_write(server):
    await ping(server.url)
    assert await ask(server.url, "CONFIG", "GET", "appendonly") == [b"appendonly", b"yes"]
    assert await ask(server.url, "CONFIG", "GET", "appendfsync") == [b"appendfsync", b"everysec"]


async def test_the_password_is_needed_and_stands_in_no_argument(server):
    password = server.url.split("@")[0].rpartition(":")[2]
    assert len(password) >= 32
    for wrong in ("", ":guess@"):
        with pytest.raises(Unauthorized, match="password") as caught:
            await ping(f"redis://{wrong}127.0.0.1:{port_of(server)}/0")
        assert "guess" not in str(caught.value)
    process = psutil.Process(server.pid)
    assert password not in " ".join(process.cmdline())
    assert password not in str(process.environ())
    for name in ("password", "valkey.conf"):
        assert (server.data_dir / name).stat().st_mode & 0o777 == 0o600


def test_it_listens_on_loopback_only(server):
    listening = psutil.Process(server.pid).net_connections(kind="inet")
    assert {c.laddr.ip for c in listening if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_two_servers_have_two_passwords(server, tmp_path):
    with EmbeddedValkey(tmp_path / "other") as other:
        assert other.url != server.url
        assert other.start() == other.url  # again: nothing happens


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_data_outlive_the_server(tmp_path, end):
    server = EmbeddedValkey(tmp_path)
    await ask(server.start(), "SET", "key", "value")
    getattr(server, end)()
    assert not server.alive() and server.pid is None
    with pytest.raises(Unavailable, match="not running"):
        _ = server.url
    getattr(server, end)()  # again: nothing happens
    assert await ask(server.start(), "GET", "key") == b"value"
    server.stop()


@pytest.mark.parametrize("cut_short", [b"", b"abc", b"\xff\xfe\x00"])
async def test_a_password_that_a_crash_cut_short_is_made_anew(tmp_path, cut_short):
    (tmp_path / "password").write_bytes(cut_short)
    with EmbeddedValkey(tmp_path) as server:
        await ping(server.url)
        assert len((tmp_path / "password").read_text()) >= 32


async def test_a_folder_may_be_called_anything(tmp_path):
    folder = tmp_path / 'a "b" \\x c\nd é'
    with EmbeddedValkey(folder) as server:
        await ping(server.url)
        assert await ask(server.url, "CONFIG", "GET", "dir") == [b"dir", os.fsencode(folder)]


def test_a_port_in_use_is_named(server, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"port {port} on 127.0.0.1 is in use"):
            EmbeddedValkey(tmp_path / "other", port).start()


def test_a_folder_has_one_server(server):
    with pytest.raises(Conflict, match="another server is running on the data"):
        EmbeddedValkey(server.data_dir).start()
    assert server.alive()


def test_a_server_that_will_not_start_says_why(tmp_path):
    with pytest.raises(Unavailable, match="ended with code 1"):
        EmbeddedValkey(tmp_path, binary=Path("/bin/false")).start()
    (tmp_path / "appendonlydir").write_text("no folder")
    with pytest.raises(Unavailable, match=r"valkey\.log ends: .*appendonlydir"):
        EmbeddedValkey(tmp_path).start()


async def test_it_survives_the_thread_that_started_it(tmp_path):
    server = EmbeddedValkey(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    # A server that was told to end does so within its next tenth of a second.
    began = (await ask(server.url, "INFO", "server"))["uptime_in_seconds"]
    while (await ask(server.url, "INFO", "server"))["uptime_in_seconds"] < began + 2:
        assert server.alive()
    server.stop()


OWNER = """
import os, signal, sys
from headway.valkey import EmbeddedValkey

server = EmbeddedValkey(sys.argv[1])

def say_pid_and_wait(*_):
    print(server.pid, flush=True)
    sys.stdin.read()

if sys.argv[2] == "starting":  # the server is forked and nothing more
    server._wait_ready = say_pid_and_wait
if sys.argv[2] == "deaf":  # what a thread blocks, its children inherit
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
server.start()
if sys.argv[2] == "stopped":
    os.kill(server.pid, signal.SIGSTOP)
say_pid_and_wait()
"""


@pytest.mark.parametrize("moment", ["running", "starting", "stopped", "deaf"])
def test_it_ends_when_its_owner_is_killed(tmp_path, moment):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), moment],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    server = psutil.Process(int(owner.stdout.readline()))
    if moment == "running":
        assert os.getsid(server.pid) != os.getsid(owner.pid)  # a terminal's Ctrl-C passes it by
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    server.wait(timeout=10)
    with EmbeddedValkey(tmp_path) as again:  # nothing is left in the way
        assert again.alive()


@pytest.fixture
def silent_port():
    """A port that takes connections and never says a word."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield silent.getsockname()[1]


async def test_a_silent_server_is_unavailable(silent_port):
    with pytest.raises(
        Unavailable, match=r"redis://127\.0\.0\.1:\d+/0 did not answer within 0.1 s"
    ):
        await ping(f"redis://:secret@127.0.0.1:{silent_port}/0", timeout_s=0.1)
