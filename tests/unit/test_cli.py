"""The command as a user runs it: exit codes and messages, nothing half-started."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from headway.errors import InvalidSpec
from headway.fleet.child import last_lines
from headway.fleet.state import (
    FleetState,
    ProcessRecord,
    instance_lock,
    make_folder,
    read_state,
    record_of,
    write_state,
)
from headway.ports import free_port
from headway.valkey import EmbeddedValkey
from tests.unit.test_plan import model_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def headway(tmp_path):
    """Runs the command in an empty folder with an empty state; returns its result."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEADWAY_")}
    env |= {"HEADWAY_STATE": str(tmp_path / "state"), "HEADWAY_CACHE": str(tmp_path / "cache")}

    def run(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headway.cli", *map(str, arguments)],
            cwd=tmp_path, env={**env, **more}, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def job_file(tmp_path):
    """Writes a small valid job, with changes by dotted key, and returns its path."""

    def write(**changes: object) -> Path:
        job = {
            "model": {"path": str(model_folder(tmp_path / "model")), "max_model_len": 64},
            "data": {
                "source": "reasoning_gym", "name": "chain_sum",
                "train_batch_size": 4, "max_prompt_length": 10,
            },
            "reward": {"grader": {"type": "numeric"}},
            "rollout": {"n": 2, "max_tokens": 5},
            "trainer": {"total_training_steps": 2},
        }  # fmt: skip
        for key, value in changes.items():
            section, _, leaf = key.partition("__")
            job.setdefault(section, {})[leaf] = value
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        return path

    return write


def assert_nothing_started(tmp_path: Path) -> None:
    assert not (tmp_path / "state" / "fleet.json").exists()
    assert not list((tmp_path / "state").glob("logs/*"))
    assert not (tmp_path / "runs").exists()


BAD_JOBS = [
    ({"rollout__temprature": 1.0}, "rollout.temprature (did you mean rollout.temperature?)"),
    ({"data__batch_size": 8}, "unknown key data.batch_size"),
    ({"model__path": "./absent"}, "model.path './absent': there is no such folder"),
    ({"reward__grader": {"type": "numeriic"}}, "unknown grader 'numeriic' (did you mean numeric?)"),
    ({"data__name": "chain_sume"}, "no data set 'chain_sume' (did you mean chain_sum?)"),
    ({"actor__ppo_mini_batch_size": 3}, "3 does not divide data.train_batch_size 4"),
    ({"actor__ppo_max_token_len_per_gpu": 14}, "no row could hold the longest answer"),
    ({"algorithm__max_policy_lag": -1}, "algorithm.max_policy_lag: Input should be greater than"),
    ({"rollout__n": 1}, "needs at least 2"),
    ({"rollout__min_nodes": 2}, "needs 2 rollout node(s) (rollout.min_nodes)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), BAD_JOBS)
def test_a_bad_job_is_refused_before_anything_starts(headway, job_file, tmp_path, changes, words):
    """S075: unknown keys are errors with a suggestion and the path; S055: n = 1 is refused."""
    done = headway("run", job_file(**changes))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_started(tmp_path)


def test_plan_refuses_what_run_refuses(headway, job_file, tmp_path):
    done = headway("plan", job_file(), "--rollouts", 0)
    assert done.returncode == 2
    assert "the fleet would have 0" in done.stderr
    assert_nothing_started(tmp_path)


def test_plan_shows_the_resolved_job(headway, job_file, tmp_path):
    done = headway("plan", job_file(), "--set", "algorithm.max_policy_lag=3", "--set", "seed=5")
    assert done.returncode == 0, done.stderr
    assert "max_policy_lag: 3" in done.stdout
    assert "seed: 5" in done.stdout
    assert "4 x (3 + 1) = 16 groups" in done.stdout
    assert "model: 1,448 parameters" in done.stdout
    assert_nothing_started(tmp_path)


def test_plan_for_programs(headway, job_file):
    plan = json.loads(headway("plan", job_file(), "--json").stdout)
    assert plan["batch"]["completions"] == 8
    assert plan["job"]["actor"]["optim"]["lr"] == 1e-6
    assert plan["problems"] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "not of the form key=value"),
        ("rollout.temprature=2", "did you mean rollout.temperature?"),
        ("model.path.x=2", "model.path.x cannot be set"),
        ("seed=abc", "seed:"),
    ],
)
def test_bad_overrides(headway, job_file, override, words):
    done = headway("plan", job_file(), "--set", override)
    assert done.returncode == 2
    assert words in done.stderr


def test_unreadable_job_files(headway, tmp_path):
    done = headway("run", "absent.yaml")
    assert (done.returncode, "cannot read the job file absent.yaml" in done.stderr) == (2, True)
    (tmp_path / "broken.yaml").write_text("model: [")
    done = headway("run", "broken.yaml")
    assert (done.returncode, "is not YAML" in done.stderr) == (2, True)


def test_a_port_in_use_is_named(headway, job_file, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments in (("up",), ("run", job_file())):
            done = headway(*arguments, "--port", port)
            assert done.returncode == 2
            assert f"port {port} on 127.0.0.1" in done.stderr
            assert "--port" in done.stderr
    assert_nothing_started(tmp_path)


def test_folders_that_take_nothing_are_named(headway, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for arguments in (("up",), ("up", "--detach")):
        done = headway(*arguments, "--engine", "sim", "--port", free_port(), "--runs-dir", "file/x")
        assert done.returncode == 2
        assert re.fullmatch(
            "error: --runs-dir: nothing can be written in .*file/x .*\n", done.stderr
        )
    with pytest.raises(InvalidSpec, match=r"HEADWAY_STATE.*nothing can be written in .*file/s"):
        instance_lock(tmp_path / "file" / "s").__enter__()
    with pytest.raises(InvalidSpec, match="nothing can be written in /dev/full "):
        make_folder(Path("/dev/full"), "--runs-dir")
    assert not (tmp_path / "state" / "fleet.json").exists()


def test_redis_down(headway, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"redis://:hush@127.0.0.1:{port}/0"
    seen = headway("up", "--redis", url)
    assert (seen.returncode, "HEADWAY_REDIS_URL" in seen.stderr) == (2, True)
    assert "hush" not in seen.stderr
    done = headway("up", "--port", free_port(), HEADWAY_REDIS_URL=url)
    assert done.returncode == 3
    assert f"127.0.0.1:{port}" in done.stderr
    assert "hush" not in done.stderr
    assert_nothing_started(tmp_path)


def test_redis_with_a_wrong_password(headway, tmp_path):
    with EmbeddedValkey(tmp_path / "valkey") as server:
        address = server.url.rpartition("@")[2]
        done = headway(
            "up", "--port", free_port(), HEADWAY_REDIS_URL=f"redis://:wrong-one@{address}"
        )
    assert done.returncode == 3
    assert "password" in done.stderr
    assert "wrong-one" not in done.stderr
    assert_nothing_started(tmp_path)


def test_cores_that_are_not_there(headway):
    done = headway("up", "--learner-cores", "4096")
    assert done.returncode == 2
    assert "--learner-cores" in done.stderr
    for cores in ("a-b", "3-1", "-1", "0-99999999999"):
        done = headway("up", "--rollout-cores", cores)
        assert done.returncode == 2
        assert f"--rollout-cores: cores '{cores}' are not of the form 0,2-3" in done.stderr


def test_a_second_up_says_what_is_up(headway, tmp_path):
    state_dir = tmp_path / "state"
    with instance_lock(state_dir):
        me = record_of("headway", os.getpid())
        node = ProcessRecord("rollout-0", 1, 0)
        write_state(state_dir, FleetState(me, "http://127.0.0.1:8700", "", "runs", True, (node,)))
        done = headway("up")
    assert done.returncode == 2
    assert f"already up at http://127.0.0.1:8700 (pid {os.getpid()}: rollout-0)" in done.stderr
    assert "headway down" in done.stderr


@pytest.mark.parametrize("command", [["jobs"], ["events", "x"], ["cancel", "x"]])
def test_no_fleet_is_exit_code_3(headway, command):
    done = headway(*command)
    assert done.returncode == 3
    assert "headway up" in done.stderr
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = headway(*command, "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == 3
    assert f"http://127.0.0.1:{port}" in done.stderr


def test_submit_checks_the_job_first(headway, job_file):
    done = headway("submit", job_file(data__name="chain_sume"), "--url", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "did you mean chain_sum?" in done.stderr
    assert headway("submit", job_file(), "--url", "http://127.0.0.1:9").returncode == 3


def test_down_ends_recorded_processes_only(headway, tmp_path):
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours, other = subprocess.Popen(sleep), subprocess.Popen(sleep)
    try:
        gone = ProcessRecord("headway", 2**22 + 1, 0)
        mine = record_of("learner", ours.pid)
        # the pid of a record whose process ended long ago, used again by a stranger
        now = record_of("reward", other.pid)
        stale = replace(now, started=now.started - 500)
        write_state(state_dir, FleetState(gone, "", "", "", True, (mine, stale)))
        assert read_state(state_dir) is None  # its supervisor is gone
        # Ended, it stays a zombie of ours meanwhile: `down` must not wait for its reaping.
        done = headway("down")
        assert (done.returncode, done.stdout) == (0, "ended learner\n")
        assert ours.wait(10) != 0
        assert other.poll() is None
        assert headway("down").stdout == "nothing is up\n"
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_report_and_version(headway, tmp_path):
    done = headway("report", "absent")
    assert (done.returncode, "no run folder" in done.stderr) == (2, True)
    run = tmp_path / "runs" / "sum-0f3a9c"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    for named in ((run,), ("sum-0f3a9c", "--runs-dir", run.parent)):
        done = headway("report", *named)
        assert (done.returncode, done.stdout.strip()) == (0, str(run / "report.html"))
    assert headway("version").stdout.startswith("headway ")


def test_unknown_commands_and_help(headway):
    for typed, said in (("runn", "(did you mean run?)"), ("zzz", "No such command 'zzz'")):
        done = headway(typed)
        assert (done.returncode, said in done.stderr) == (2, True)
    done = headway("--help")
    assert done.returncode == 0
    assert "130 cancelled" in done.stdout


@pytest.mark.parametrize("command", ["run", "plan", "up", "submit", "report"])
def test_no_command_imports_torch_or_vllm(command):
    code = (
        f"import sys, headway.cli as c; c.group.get_command(None, {command!r});"
        "heavy = {'torch', 'vllm', 'transformers', 'reasoning_gym', 'grpc'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_imports_no_command():
    code = (
        "import sys, headway.cli as c; c.run_command(['--help']);"
        "print(sorted({'pydantic', 'httpx', 'redis', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_last_lines_of_a_log_are_for_people(tmp_path):
    log = tmp_path / "x.log"
    assert last_lines(log) == "(no log)"
    log.write_text("")
    assert last_lines(log) == "(the log is empty)"
    row = {"level": "error", "message": "it broke", "exception": "Traceback\n  x\nKeyError: 'a'"}
    log.write_text("first\nsecond\n" + json.dumps(row) + "\n[1, 2]\n")
    assert last_lines(log, 3) == "second\nerror it broke KeyError: 'a'\n[1, 2]"
