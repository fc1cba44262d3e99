"""The answers that would run for ever, in real workers: right or null, and no worker lost."""

import json
from pathlib import Path

from headway.messages import ScoreItem
from services.reward.workers import PoolSettings
from tests.support.reward_stand import service

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "cases" / "answers.jsonl").read_text().splitlines()
]
LIMIT_S = 250.0  # nothing in here may need the hard limit


def limited(grader):
    return {"type": grader, "timeout_s": LIMIT_S}


async def test_the_worst_answers_cost_no_worker_and_are_never_wrongly_right():
    worst = [case for case in CASES if {"adversarial", "huge"} & set(case["tags"])]
    assert len(worst) > 30
    async with service(PoolSettings(num_workers=1)) as (server, client):
        workers = server.pool.pids
        for grader in {case["grader"] for case in worst}:
            cases = [case for case in worst if case["grader"] == grader]
            items = [ScoreItem(None, c["completion"], {"answer": c["gold"]}) for c in cases]
            scores = await client.score(grader, "", limited(grader), items, LIMIT_S)
            for case, score in zip(cases, scores, strict=True):
                assert score.reward == case["verdict"], (case["id"], score)
        assert server.pool.pids == workers


async def test_what_cannot_be_decided_in_time_is_null_and_the_worker_stays():
    undecided = "\\boxed{\\int_0^1\\int_0^1\\int_0^1 e^{xyz} dx dy dz}"
    items = [
        ScoreItem(None, undecided, {"answer": "\\frac{17}{19}"}),
        ScoreItem(None, "\\boxed{\\frac{2}{4}}", {"answer": "0.5"}),
        ScoreItem(None, "\\boxed{5}", {"answer": "\\boxed{}"}),
    ]
    async with service(PoolSettings(num_workers=1)) as (server, client):
        workers = server.pool.pids
        scores = await client.score("r", "", limited("math"), items, LIMIT_S)
        assert [(score.reward, score.error_kind) for score in scores] == [
            (None, "timeout"),
            (1.0, ""),
            (None, "bad_input"),
        ]
        assert server.pool.pids == workers
