"""PPO through the whole learner: critic and policy in one job, killed, resumed, replayed."""

from __future__ import annotations

import asyncio
import json

import pytest
from safetensors.torch import load_file

from headway.jobspec import parse_job
from tests.integration.test_exact_resume import Killed
from tests.integration.test_learner_loop import Place, job
from tests.integration.test_replay import replay
from tests.support.mortal_rank import Death, MortalRanks
from tests.support.scripted_node import ScriptedNode
from tests.support.tiny_model import build_tiny_model

STEPS, WARMUP = 5, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture(scope="module")
def mortal():
    return MortalRanks()


@pytest.fixture
def place(valkey_url, job_id, tmp_path):
    return Place(valkey_url, job_id, tmp_path)


def ppo(model, warmup=WARMUP, **changes):
    raw = job(model, steps=STEPS, **changes).model_dump(mode="json")
    raw["algorithm"] |= {"adv_estimator": "gae", "lam": 0.95, "use_kl_in_reward": True}
    raw["critic"] = {"optim": {"lr": 1e-3}}
    raw["trainer"]["critic_warmup"] = warmup
    return parse_job(raw)


async def test_a_ppo_job_of_two_ranks_killed_on_its_way_is_replayed_bit_for_bit(
    place, mortal, model
):
    killed = Killed(place, mortal, ppo(model, ranks=2, lag=2))
    await killed.run(Death("before commit", 1), Death("before the row", 4))
    target, comparison = await replay(place, mortal, "again")
    assert (comparison["verdict"], comparison["first_difference"]) == ("equal", None)
    assert comparison["run_steps"] == comparison["replay_steps"] == STEPS
    run, again = place.weights(), load_file(target / "model" / "model.safetensors")
    assert all((run[name] == again[name]).all() for name in run)
    rows = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    same = ("actor/weights_digest", "critic/vf_loss", "critic/values/mean", "critic/grad_norm")
    for row, was in zip(rows, place.rows("metrics.jsonl"), strict=True):
        assert {name: row[name] for name in same} == {name: was[name] for name in same}
    figures = {figure["name"]: figure for figure in comparison["figures"]}
    assert figures["critic/vf_loss"]["run_mean"] == figures["critic/vf_loss"]["replay_mean"]


async def test_warm_up_steps_commit_and_publish_the_same_policy(place, mortal, model):
    async with ScriptedNode(place.ledger).serving() as node:
        code, status = await place.lead(ppo(model, warmup=STEPS - 1))
    assert (code, status.step) == (0, STEPS)
    assert node.installed == list(range(STEPS))  # the last version is sampled by nobody
    rows = place.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [("actor/pg_loss" in row) for row in rows] == [False] * (STEPS - 1) + [True]
    assert all(row["critic/vf_loss"] > 0 for row in rows)
    assert all(row["actor/skipped"] == 0.0 for row in rows)
    first, last = rows[0], rows[-1]
    assert first["critic/values/max"] == 0.0 and last["critic/values/max"] != 0.0
    assert (place.folder.path / "report.html").read_text().startswith("<!doctype html>")
    # the same groups without a warm-up: only then does the policy move in the first steps
    target, comparison = await replay(place, mortal, "cold", ("trainer.critic_warmup", 0))
    assert comparison["changed"] == {"trainer.critic_warmup": [STEPS - 1, 0]}
    assert comparison["first_difference"] == 1
    before = load_file(model / "model.safetensors")

    def moved(after):
        return sum(float((after[n] - before[n]).abs().sum()) for n in before)

    cold = load_file(target / "model" / "model.safetensors")
    assert 0 < moved(place.weights()) < moved(cold)
    # and as another algorithm altogether
    _, comparison = await replay(
        place, mortal, "grpo", ("algorithm.adv_estimator", "grpo"), ("algorithm.lam", 1.0),
        ("critic.optim.lr", 1e-5), ("trainer.critic_warmup", 0),
    )  # fmt: skip
    assert comparison["verdict"] == "differs"


async def test_a_critic_of_its_own_folder_is_written_down_and_checked(
    place, mortal, model, tmp_path
):
    own = build_tiny_model(tmp_path / "critic", seed=7, num_layers=1)
    raw = ppo(model).model_dump(mode="json")
    raw["critic"]["model"] = {"path": str(own)}
    async with ScriptedNode(place.ledger).serving():
        assert (await place.lead(parse_job(raw)))[0] == 0
    facts = json.loads(place.folder.environment.read_text())
    assert facts["critic"]["folder"] == str(own) and len(facts["critic"]["sha256"]) == 64
    assert facts["critic"]["sha256"] != facts["model"]["sha256"]
    _, comparison = await replay(place, mortal, "again")
    assert comparison["verdict"] == "equal"
    await asyncio.to_thread(build_tiny_model, own, seed=8, num_layers=1)
    target = place.folder.path / "replays" / "changed"
    target.mkdir()
    (target / "job.yaml").write_text(place.folder.job.read_text())
    flags = ["--run-dir", str(place.folder.path), "--replay-dir", str(target)]
    assert await mortal.run(flags, 1) == [2]
    assert "not what the run's critic started from" in place.folder.log.read_text()
