"""ReMax through the whole learner: the greedy reward comes with the group, also in a replay."""

from __future__ import annotations

import dataclasses

import pytest

from headway.jobspec import parse_job
from headway.messages import Baseline
from tests.integration.test_learner_loop import Place, job
from tests.integration.test_replay import replay
from tests.support.mortal_rank import MortalRanks
from tests.support.scripted_node import ScriptedNode, scripted_group
from tests.support.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture
def place(valkey_url, job_id, tmp_path):
    return Place(valkey_url, job_id, tmp_path)


def with_baseline(lease):
    reward = 0.25 * (lease.ticket.ticket_id % 3)
    return dataclasses.replace(scripted_group(lease), baseline=Baseline(reward, 5))


def remax(model):
    raw = job(model, steps=3).model_dump(mode="json")
    raw["algorithm"] |= {"adv_estimator": "remax"}
    return parse_job(raw)


async def test_a_remax_job_is_trained_and_replayed_bit_for_bit(place, model):
    mortal = MortalRanks()
    async with ScriptedNode(place.ledger, with_baseline).serving():
        code, status = await place.lead(remax(model))
    assert (code, status.step) == (0, 3), status
    rows = place.rows("metrics.jsonl")
    # tickets 0 and 1, 2 and 3, 4 and 5: rewards of every second completion 1, the others 0
    assert [row["critic/baseline/mean"] for row in rows] == [0.125, 0.25, 0.375]
    assert [row["critic/advantages/mean"] for row in rows] == [0.375, 0.25, 0.125]
    assert [s["baseline"] for s in place.rows("samples.jsonl")] == [0.0, 0.25, 0.5, 0.0, 0.25, 0.5]
    _, comparison = await replay(place, mortal, "again")
    assert comparison["verdict"] == "equal"


async def test_groups_of_another_advantage_cannot_be_replayed_as_remax(place, model):
    mortal = MortalRanks()
    async with ScriptedNode(place.ledger).serving():
        assert (await place.lead(job(model, steps=2)))[0] == 0
    target = place.folder.path / "replays" / "remax"
    target.mkdir(parents=True)
    (target / "job.yaml").write_text(remax(model).to_yaml())
    flags = ["--run-dir", str(place.folder.path), "--replay-dir", str(target)]
    assert await mortal.run(flags, 1) == [2]
    assert "was sampled without the greedy completion" in place.folder.log.read_text()
