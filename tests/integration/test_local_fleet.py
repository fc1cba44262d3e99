"""The local fleet through the real command: it starts, survives, and leaves nothing behind."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import yaml

from headway.access.process import Access
from headway.client import HeadwayClient
from headway.fleet.state import FleetState, read_state
from headway.pb import (
    learner_pb2,
    learner_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
)
from headway.ports import free_port
from headway.rpc import channel
from tests.support.tiny_model import build_tiny_model
from tests.support.whole_job import command, environment, tiny_job


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1, dtype="float32")


class Command:
    """A command under way, with all processes it has started."""

    def __init__(self, tmp: Path, *args: str, **env: str) -> None:
        self.tmp = tmp
        self.process = subprocess.Popen(
            command(tmp, *args), cwd=tmp, env={**environment(tmp), **env}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[str] = []

    def until(self, words: str) -> str:
        """Reads up to the line that holds `words`, and returns it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"no {words!r} in:\n{''.join(self.lines)}")

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> int:
        """Waits for the end; returns the exit code."""
        rest, _ = self.process.communicate(timeout=150)
        self.lines.append(rest)
        return self.process.returncode

    @property
    def output(self) -> str:
        return "".join(self.lines)


@pytest.fixture
def headway(tmp_path):
    started: list[Command] = []

    def start(*args: str, **env: str) -> Command:
        started.append(Command(tmp_path, *args, **env))
        return started[-1]

    yield start
    subprocess.run(command(tmp_path, "down"), env=environment(tmp_path), check=True, timeout=150)
    for one in started:
        one.process.kill()
        one.process.communicate()


def write_job(tmp: Path, model: Path, **changes: object) -> str:
    path = tmp / "job.yaml"
    path.write_text(yaml.safe_dump(tiny_job(model, **changes)))
    return str(path)


def assert_gone(family: list[psutil.Process]) -> None:
    assert len(family) >= 5  # Redis, coordinator, reward, learner, a rollout node
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [process.cmdline() for process in alive] == []


def rows(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def sim_run(headway, job: str, *flags: str) -> Command:
    return headway("run", job, "--engine", "sim", "--port", str(free_port()), *flags)


def test_ctrl_c_cancels_the_job_and_leaves_a_readable_run(headway, model, tmp_path):
    run = sim_run(headway, write_job(tmp_path, model, trainer__total_training_steps=100_000))
    run.until("step 2/")
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert_gone(family)
    (folder,) = (tmp_path / "runs").iterdir()
    steps = [row["step"] for row in rows(folder, "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 2
    assert "<svg" in (folder / "report.html").read_text()
    assert yaml.safe_load((folder / "job.yaml").read_text())["seed"] == 3
    assert read_state(tmp_path / "state") is None


def test_a_second_ctrl_c_ends_everything_at_once(headway, model, tmp_path):
    run = sim_run(headway, write_job(tmp_path, model, trainer__total_training_steps=100_000))
    run.until("step 1/")
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    run.until("once more to stop at once")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert_gone(family)


def test_ctrl_c_while_the_fleet_starts(headway, model, tmp_path):
    run = sim_run(headway, write_job(tmp_path, model))
    run.until("starting reward, learner")
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert not list((tmp_path / "runs").iterdir())


def test_a_killed_command_takes_its_children_with_it(headway, model, tmp_path):
    run = sim_run(headway, write_job(tmp_path, model, trainer__total_training_steps=100_000))
    run.until("step 1/")
    family = run.family()
    run.process.kill()
    run.end()
    assert_gone(family)
    # What it left on disk does not keep the next one from starting.
    again = sim_run(headway, write_job(tmp_path, model, trainer__total_training_steps=2))
    assert again.end() == 0, again.output
    assert "succeeded after 2 steps" in again.output


def test_a_process_that_dies_at_its_start_shows_its_last_words(headway, tmp_path):
    up = headway("up", "--engine", "sim", "--port", str(free_port()), HEADWAY_ALLOW_PATHS="here")
    assert up.end() == 2, up.output
    assert "coordinator ended with code 2" in up.output
    assert "'here' is no absolute path" in up.output
    assert "Traceback" not in up.output
    assert read_state(tmp_path / "state") is None


def rollout_address(client: HeadwayClient) -> str:
    nodes = client.fleet()["nodes"]
    return next((node["address"] for node in nodes if node["role"] == "rollout"), "")


def test_killed_rollout_node_and_redis_are_started_again_and_the_job_goes_on(
    headway, model, tmp_path
):
    changes = {"trainer__total_training_steps": 200, "rollout__lease_s": 3.0}
    run = sim_run(headway, write_job(tmp_path, model, **changes))
    run.until("step 3/")
    state = read_state(tmp_path / "state")
    assert state is not None
    (node,) = (record for record in state.processes if record.name == "rollout-0")
    with HeadwayClient(state.api_url, Path(state.token_file).read_text().strip()) as client:
        before = rollout_address(client)
        os.kill(node.pid, signal.SIGKILL)
        run.until("starting rollout-0 again")
        # another address: the learner holds nothing of its predecessor against it
        while (after := rollout_address(client)) in ("", before):
            pass
    assert after != before
    (redis,) = (record for record in state.processes if record.name == "valkey")
    os.kill(redis.pid, signal.SIGKILL)
    run.until("starting it again on its data")
    assert run.end() == 0, run.output
    assert "succeeded after 200 steps" in run.output


def secrets_of(state: FleetState) -> list[str]:
    folder = Path(state.token_file).parent
    tokens = [(folder / f"{role}.token").read_text().strip() for role in ("admin", "service")]
    return [*tokens, state.redis_url.partition("://:")[2].partition("@")[0]]


def check_secrets(state: FleetState, family: list[psutil.Process]) -> None:
    """They stand in no command line and no log, and in files of their owner's only."""
    secrets = secrets_of(state)
    assert len(secrets) == 3 and all(len(secret) > 20 for secret in secrets)
    seen = " ".join(part for process in family for part in process.cmdline())
    folder = Path(state.token_file).parent
    seen += " ".join(log.read_text() for log in (folder / "logs").iterdir())
    assert not [secret for secret in secrets if secret in seen]
    for path in folder.rglob("*"):
        if path.is_file() and any(s.encode() in path.read_bytes() for s in secrets):
            assert path.stat().st_mode & 0o077 == 0, path


async def check_doors(state: FleetState) -> None:
    """Nobody gets in anywhere without a token."""
    with HeadwayClient(state.api_url, Path(state.token_file).read_text().strip()) as client:
        nodes = client.fleet()["nodes"]
    assert {node["role"] for node in nodes} == {"learner", "rollout", "reward"}
    calls = {
        "learner": (learner_pb2_grpc.LearnerServiceStub, "GetLearnerStatus",
                    learner_pb2.GetLearnerStatusRequest()),
        "rollout": (rollout_pb2_grpc.RolloutServiceStub, "GetStatus",
                    rollout_pb2.GetStatusRequest()),
        "reward": (reward_pb2_grpc.RewardServiceStub, "Score", reward_pb2.ScoreRequest()),
    }  # fmt: skip
    async with httpx.AsyncClient() as http:
        for node in nodes:
            stub, method, request = calls[node["role"]]
            async with channel(node["address"], Access()) as link:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await getattr(stub(link), method)(request, timeout=10)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            for path in ("/metrics", "/v1/score"):
                assert (await http.get(node["http_address"] + path)).status_code == 401
        for path in ("/metrics", "/v1/jobs", "/v1/fleet"):
            assert (await http.get(state.api_url + path)).status_code == 401


def test_up_submit_watch_cancel_down(headway, model, tmp_path):
    port = str(free_port())
    up = headway("up", "--engine", "sim", "--rollouts", "2", "--port", port, "--detach")
    assert up.end() == 0, up.output
    state = read_state(tmp_path / "state")
    assert state is not None
    names = {record.name for record in state.processes}
    assert names == {"coordinator", "reward", "learner", "rollout-0", "rollout-1", "valkey"}
    assert (tmp_path / "state" / "fleet.json").stat().st_mode & 0o077 == 0  # it holds a password
    family = [p for record in state.processes if (p := record.process()) is not None]
    check_secrets(state, family)
    asyncio.run(check_doors(state))

    second = headway("up", "--engine", "sim", "--port", str(free_port()))
    assert second.end() == 2
    assert f"already up at http://127.0.0.1:{port}" in second.output

    short = headway(
        "submit", write_job(tmp_path, model, trainer__total_training_steps=2), "--follow"
    )
    assert short.end() == 0, short.output
    assert "step 2/2" in short.output

    long_job = write_job(tmp_path, model, trainer__total_training_steps=100_000)
    run = headway("run", long_job)  # joins the fleet that is up
    run.until("step 1/")
    listed = headway("jobs", "--json")
    assert listed.end() == 0
    (newest, oldest) = json.loads(listed.output)
    assert (newest["state"], oldest["state"]) == ("running", "succeeded")
    assert headway("cancel", newest["job_id"]).end() == 0
    assert run.end() == 130, run.output
    events = headway("events", newest["job_id"], "--json")
    assert events.end() == 0
    kinds = [json.loads(line)["kind"] for line in events.output.splitlines()]
    assert kinds[0] == "submitted"
    assert kinds[-1] == "cancelled"

    check_secrets(state, family)
    runs = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(runs) > 8
    for path in runs:  # nor do a run's own files hold one
        data = path.read_bytes()
        assert not [secret for secret in secrets_of(state) if secret.encode() in data], path

    down = headway("down")
    assert down.end() == 0
    assert "coordinator" in down.output
    assert_gone(family)


def test_a_fleet_without_rollout_nodes_refuses_a_job(headway, model, tmp_path):
    up = headway("up", "--rollouts", "0", "--port", str(free_port()), "--detach")
    assert up.end() == 0, up.output
    refused = headway("submit", write_job(tmp_path, model))
    assert refused.end() == 3
    assert "rollout" in refused.output
