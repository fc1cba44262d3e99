"""The command where its surroundings are not as they should be: folders, files, variables."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli import run_command
from headway.cli.interrupts import counting_interrupts
from headway.fleet.child import Child, ChildSpec, last_lines
from headway.fleet.state import (
    FleetState,
    instance_lock,
    read_state,
    record_of,
    stop_recorded,
    write_state,
)
from headway.follow import Deaf, PlainView

ROOT = Path(__file__).parents[2]
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
UNSAFE = re.compile(r"sys\.executable,\s*\"-[mc]\"")
# Holds the fleet's lock as `headway up` does, before it has written anything else.
STARTER = """
import sys, time
from pathlib import Path
from headway.fleet.state import instance_lock
with instance_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def state_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_STATE", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def test_what_the_system_refuses_is_a_message(state_dir, tmp_path, capsys):
    name = "a" * 300
    assert run_command(["export", name]) == 2
    assert f"error: {name}/job.yaml: File name too long\n" == capsys.readouterr().err
    assert run_command(["token", "create", "--name", "x", "--out", str(tmp_path / "no" / "t")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_a_full_disk_behind_stdout(state_dir):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headway.cli", "version"],
            stdout=full, stderr=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_a_folder_that_is_gone(state_dir, tmp_path, capsys, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    assert run_command(["up"]) == 2
    assert "the folder that the command runs in is not there any more" in capsys.readouterr().err


def test_a_user_without_a_home(capsys, monkeypatch):
    for name in ("HOME", "HEADWAY_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert run_command(["jobs"]) == 2
    assert "no home folder: name a folder in HEADWAY_STATE" in capsys.readouterr().err


def test_a_log_level_that_is_none(state_dir, capsys, monkeypatch):
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", "loud")
    assert run_command(["up", "--engine", "sim"]) == 2
    said = "HEADWAY_LOG_LEVEL: log level 'loud' is none of debug, info, warning, error, critical"
    assert said in capsys.readouterr().err
    assert not list(state_dir.iterdir())


def good_state(**changes: object) -> dict[str, object]:
    me = {"name": "headway", "pid": os.getpid(), "started": 1, "boot": ""}
    state = {"supervisor": me, "api_url": "", "redis_url": "", "runs_dir": "", "ready": True,
             "processes": []}  # fmt: skip
    return {**state, **changes}


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        '"text"',
        "[" * 100_000,
        json.dumps(good_state(supervisor=[])),
        json.dumps(good_state(supervisor={"name": "x", "pid": -1, "started": 1})),
        json.dumps(good_state(supervisor={"name": "x", "pid": "1", "started": 1})),
        json.dumps(good_state(supervisor={"name": "x", "pid": 1, "started": None})),
        json.dumps(good_state(processes=[{"name": 1, "pid": 1, "started": 1}])),
        json.dumps(good_state(processes=5)),
        json.dumps(good_state(api_url=None)),
    ],
)
def test_a_damaged_fleet_file_is_as_good_as_none(state_dir, damaged, capsys):
    (state_dir / "fleet.json").write_text(damaged)
    assert read_state(state_dir) is None
    assert run_command(["jobs"]) == 3
    assert "headway up" in capsys.readouterr().err
    assert run_command(["down"]) == 0


def test_down_ends_a_fleet_that_is_only_being_started(state_dir):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(state_dir)], stdout=subprocess.PIPE, env=env
    )
    try:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"held\n"
        assert stop_recorded(state_dir, 60.0) == ("headway",)
        assert starter.wait(60) == -signal.SIGTERM
        assert stop_recorded(state_dir, 60.0) == ()  # the lock's file names one who is gone
    finally:
        starter.kill()
        starter.communicate()


def test_a_fleet_that_starts_does_not_end_itself(state_dir):
    with instance_lock(state_dir):
        assert stop_recorded(state_dir, 0.0) == ()
    with (state_dir / "fleet.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert file.read() == ""  # and nobody else ends us for it


def test_a_process_is_known_whatever_the_clock_says(state_dir, monkeypatch):
    process = subprocess.Popen(SLEEP)
    try:
        write_state(state_dir, FleetState(record_of("x", process.pid), "", "", "", True, ()))
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 12345.0)  # it was set
        state = read_state(state_dir)
        assert state is not None
        found = state.supervisor.process()
        assert found is not None
        assert found.pid == process.pid
    finally:
        process.kill()
        process.wait()


def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with counting_interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts() == 1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_process_of_ours_takes_modules_from_the_users_folder():
    """`python -m` looks there first: a queue.py or services/ of the user's would be loaded."""
    sources = [path for part in ("headway", "services") for path in (ROOT / part).rglob("*.py")]
    unsafe = [path for path in sources if UNSAFE.search(path.read_text())]
    assert len(sources) > 100
    assert unsafe == []


def test_readiness_is_asked_of_this_machine_whatever_proxy_there_is(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    script = (
        "import http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "s = h.HTTPServer(('127.0.0.1', 0), H)\n"
        "print(s.server_port, flush=True)\n"
        "s.serve_forever()\n"
    )
    log = tmp_path / "log"
    child = Child(ChildSpec("x", (sys.executable, "-c", script), {}, log, ""))
    try:
        while not log.read_text().endswith("\n"):
            assert child.exit_code is None, child.last_words()
        address = f"http://127.0.0.1:{log.read_text().strip()}"
        child.spec = ChildSpec("x", child.spec.argv, {}, log, address)
        assert child.ready()
    finally:
        child.signal_group(signal.SIGKILL)


def test_of_a_traceback_in_a_log_what_was_raised_is_shown(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        'before\nTraceback (most recent call last):\n  File "x", line 1\n    f()\n\n'
        "ValueError: it broke\nafter\n"
    )
    assert last_lines(log) == "before\nValueError: it broke\nafter"


def test_a_reader_who_left_is_noticed_and_hurts_nobody(monkeypatch):
    def fails(number: int) -> None:
        def echo(*_: object, **__: object) -> None:
            raise OSError(number, "why")

        monkeypatch.setattr("click.echo", echo)

    view = Deaf(PlainView(3))
    view.tell(lambda: None)
    fails(errno.ENOSPC)
    view.step({"step": 1})
    assert not view.unheard  # a full disk: there will be room again
    fails(errno.EPIPE)
    view.step({"step": 2})
    assert view.unheard
    view.event({})
    view.say("x")
    view.close()
