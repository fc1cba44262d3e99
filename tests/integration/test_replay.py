"""Replays: the recorded groups trained again, bit for bit or with other settings."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
from safetensors.torch import load_file

from headway.cli import run_command
from headway.jobspec import load_job
from tests.integration.test_exact_resume import Killed
from tests.integration.test_learner_loop import Place, job
from tests.support.mortal_rank import Death, MortalRanks
from tests.support.scripted_node import ScriptedNode
from tests.support.tiny_model import build_tiny_model

STEPS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture(scope="module")
def mortal():
    return MortalRanks()


@pytest.fixture
def place(valkey_url, job_id, tmp_path):
    return Place(valkey_url, job_id, tmp_path)


async def replay(run, mortal, name, *overrides):
    """The replay of a run, in processes forked as its ranks are; its folder and comparison."""
    target = run.folder.path / "replays" / name
    target.mkdir(parents=True)
    spec = load_job(run.folder.job, overrides)
    (target / "job.yaml").write_text(spec.to_yaml())
    flags = ["--run-dir", str(run.folder.path), "--replay-dir", str(target)]
    codes = await mortal.run(flags, spec.actor.num_ranks)
    assert codes == [0] * len(codes), run.folder.log.read_text()[-2000:]
    return target, json.loads((target / "comparison.json").read_text())


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_run_killed_on_its_way_is_replayed_bit_for_bit(place, mortal, model, ranks):
    spec = job(model, steps=STEPS, save_freq=2, ranks=ranks, lag=2)
    killed = Killed(place, mortal, spec)
    await killed.run(Death("before commit", 1), Death("before the row", 4))
    target, comparison = await replay(place, mortal, "again")
    assert (comparison["verdict"], comparison["first_difference"]) == ("equal", None)
    assert comparison["run_steps"] == comparison["replay_steps"] == STEPS
    run, again = place.weights(), load_file(target / "model" / "model.safetensors")
    assert run.keys() == again.keys()
    assert all((run[name] == again[name]).all() for name in run)
    assert comparison["weights"]["apart"] == 0.0 < comparison["weights"]["run_moved"]
    rows = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    same = ("actor/weights_digest", "actor/pg_loss", "actor/grad_norm", "critic/score/mean",
            "lag/max", "training/num_tokens")  # fmt: skip
    for row, was in zip(rows, place.rows("metrics.jsonl"), strict=True):
        assert {name: row[name] for name in same} == {name: was[name] for name in same}


@pytest.fixture(scope="module")
def undisturbed(valkey_url, model, tmp_path_factory):
    """A job that nobody disturbed."""

    async def whole():
        place = Place(valkey_url, "recorded", tmp_path_factory.mktemp("undisturbed"))
        async with ScriptedNode(place.ledger).serving():
            assert (await place.lead(job(model, steps=3)))[0] == 0
        await place.redis.aclose()
        return place

    return asyncio.run(whole())


@pytest.fixture
async def recorded(undisturbed, valkey_url, tmp_path):
    """A copy of its folder, to be spoilt."""
    copy = Place(valkey_url, undisturbed.job_id, tmp_path / "runs")
    shutil.copytree(undisturbed.folder.path, copy.folder.path)
    yield copy
    await copy.redis.aclose()


async def test_other_settings_on_the_same_data_are_compared(recorded, mortal):
    changed = [
        ("algorithm.rollout_correction.type", "none"),
        ("algorithm.rollout_correction.proximal", "bypass"),
        ("algorithm.clip_ratio_high", 0.9),
    ]
    target, comparison = await replay(recorded, mortal, "unclipped", *changed)
    assert comparison["changed"] == {
        "algorithm.clip_ratio_high": [0.2, 0.9],
        "algorithm.rollout_correction.proximal": ["recompute", "bypass"],
        "algorithm.rollout_correction.type": ["tis", "none"],
    }
    assert (comparison["verdict"], comparison["first_difference"]) == ("differs", 1)
    figures = {figure["name"]: figure for figure in comparison["figures"]}
    clipped = figures["actor/pg_clipfrac"]
    rows = recorded.rows("metrics.jsonl")
    assert clipped["run_mean"] == sum(row["actor/pg_clipfrac"] for row in rows) / 3
    assert clipped["run_last"] == rows[-1]["actor/pg_clipfrac"] != clipped["replay_last"]
    assert comparison["weights"]["apart"] > 0
    assert load_job(target / "job.yaml").algorithm.clip_ratio_high == 0.9
    assert not (recorded.folder.path / "replays" / "unclipped" / "groups.log").exists()


def command(capfd, *argv):
    code = run_command(["replay", *map(str, argv)])
    out, err = capfd.readouterr()
    return code, out, err


async def test_the_command_replays_without_fleet_or_redis(recorded, capfd, monkeypatch):
    monkeypatch.setenv("HEADWAY_REDIS_URL", "redis://127.0.0.1:1")
    run = recorded.folder.path
    code, out, err = command(capfd, recorded.job_id, "--runs-dir", run.parent)
    assert code == 0, err
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [
        "step 1 of 3", "step 2 of 3", "step 3 of 3",
    ]  # fmt: skip
    assert lines[0].endswith("weights as in the run")
    assert lines[-2] == "replayed 3 of 3 steps: the weights are equal, bit for bit, after each"
    assert (run / "replays" / "replay-1" / "report.html").read_text().startswith("<!doctype html>")


async def test_what_cannot_be_replayed_is_said_at_once(recorded, capfd, tmp_path):
    run = recorded.folder.path
    for argv, said in (
        (["nowhere"], "'nowhere' is neither a run folder nor a job in runs"),
        (["../x"], "neither a run folder"),
        ([run, "--set", "data.seed=1"], "data.seed cannot be set in a replay"),
        ([run, "--set", "algorithm.max_policy_lag=9"], "algorithm.max_policy_lag cannot be set"),
        ([run, "--set", "algorithm.clip=1"], "unknown key algorithm.clip"),
        ([run, "--name", "../up"], "job id '../up' is not"),
    ):
        code, _, err = command(capfd, *argv)
        assert code == 2 and said in err, err
    assert not list((run / "replays").glob("*")) or not (run / "replays").exists()
    (run / "replays" / "mine").mkdir(parents=True)
    code, _, err = command(capfd, run, "--name", "mine")
    assert code == 2 and "choose another --name" in err


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda run, model: (run / "groups.log").unlink(), "holds no step"),
        (lambda run, model: (run / "environment.json").unlink(), "environment.json is missing"),
        (lambda run, model: build_tiny_model(model, seed=2), "its files have changed"),
        (lambda run, model: spoil(run / "groups.log"), "step 2 is damaged"),
    ],
)
async def test_a_run_that_lacks_what_it_takes_is_refused(
    recorded, mortal, model, tmp_path, harm, said
):
    own = tmp_path / "own-model"
    shutil.copytree(model, own)
    path = recorded.folder.path
    target = path / "replays" / "r"
    target.mkdir(parents=True)
    spec = load_job(recorded.folder.job, [("model.path", str(own))])
    (target / "job.yaml").write_text(spec.to_yaml())
    harm(path, own)
    codes = await mortal.run(["--run-dir", str(path), "--replay-dir", str(target)], 1)
    assert codes == [2]
    assert said in recorded.folder.log.read_text()


def spoil(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)
