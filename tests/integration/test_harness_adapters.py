"""Graders inside other harnesses, called as those call them; the harnesses themselves run in
bench/harnesses.py."""

import asyncio
import copy
import math
import os
import pickle
import signal
from types import SimpleNamespace

import psutil
import pytest

from headway.adapters import scoring
from headway.adapters.lighteval import HeadwayComputation, mean_reward
from headway.adapters.lm_eval import HeadwayFilter, HeadwayMetric, rewards_given
from headway.adapters.scoring import Grading, mean_of_scored
from headway.adapters.trl import HeadwayReward
from headway.errors import InvalidSpec
from headway.messages import ScoreItem
from tests.support.desk import Service

LAST = {"type": "numeric", "extract": "last"}
SHAPED = {
    "type": "sum",
    "graders": {"short": {"type": "regex", "pattern": r"^\d+$"}, "right": LAST},
    "weights": {"short": 0.2, "right": 0.8},
}


@pytest.fixture(scope="module")
def address():
    service = Service("reward", "--workers", "1")
    asyncio.run(service.ready())
    yield next(row["http_address"] for row in service.log if "http_address" in row)
    service.kill()


def test_lm_eval_gets_a_documents_reward_and_what_had_none(address):
    metric = HeadwayMetric(SHAPED, address, parts=("right",))
    doc = {"question": "1 + 2?", "answer": "3"}
    assert metric(doc, ["3"]) == {"reward": 1.0, "reward_null": 0.0, "right": 1.0}
    assert metric(doc, ["It is 3"])["reward"] == 0.8
    of_three = metric(doc, [["3", "4", "three"]])  # repeats come as a list within
    assert of_three["reward"] == pytest.approx((1.0 + 0.2 + 0.0) / 3)
    no_gold = metric({"question": "1 + 2?"}, ["3"])
    assert math.isnan(no_gold["reward"]) and no_gold["reward_null"] == 1.0


def test_a_filter_scores_a_whole_task_and_the_report_is_the_same(address):
    docs = [{"answer": str(n)} for n in range(40)] + [{}]
    resps = [[str(n), f"{n} or {n + 1}"] for n in range(40)] + [["1", "2"]]
    rewards = HeadwayFilter(LAST, address)(resps, docs)
    assert rewards[:40] == [[1.0, 0.0]] * 40 and all(map(math.isnan, rewards[40]))
    for doc, row, answers in zip(docs[:3], rewards, resps, strict=False):
        assert rewards_given(doc, row) == HeadwayMetric(LAST, address)(doc, answers)
    nothing = rewards_given({}, rewards[40])
    assert math.isnan(nothing["reward"]) and nothing["reward_null"] == 1.0


def test_lighteval_gets_one_value_a_document_and_leaves_nulls_out(address):
    def document(answer, **specific):
        return SimpleNamespace(
            query="?", specific=specific, get_golds=lambda: answer if answer else [""]
        )

    def response(*texts):
        return SimpleNamespace(final_text=list(texts))

    metric = HeadwayComputation(LAST, address)
    docs = [document(["3"]), document(["4"]), document([]), document(["5", "6"])]
    responses = [response("3", "4"), response("4"), response("9"), response("6")]
    values = metric.compute(docs=docs, responses=responses)
    assert values[:2] == [0.5, 1.0] and math.isnan(values[2]) and values[3] == 1.0
    assert metric.compute(doc=docs[0], model_response=responses[0]) == 0.5
    assert mean_reward(values) == pytest.approx(2.5 / 3)
    assert math.isnan(mean_reward([math.nan]))


def test_trl_gets_a_reward_a_completion_and_none_for_nulls(address):
    reward = HeadwayReward(LAST, address, name="sums")
    logged = {}
    chat = [[{"role": "assistant", "content": text}] for text in ("3", "4", "7")]
    got = reward(
        prompts=[[{"role": "user", "content": "?"}]] * 3,
        completions=chat,
        completion_ids=[[1], [2], [3]],
        answer=["3", "3", None],
        trainer_state=object(),
        log_extra=lambda name, values: None,
        log_metric=logged.__setitem__,
    )
    assert got == [1.0, 0.0, None] and reward.__name__ == "sums"
    assert logged == {"rewards/sums/null": pytest.approx(1 / 3)}
    assert reward(prompts=["?"], completions=["3"], answer=["3"]) == [1.0]
    short = HeadwayReward({"type": "length", "unit": "tokens", "max": 2}, address)
    ids = [[1, 2], [1, 2, 3], []]
    assert short(prompts=["?"] * 3, completions=["a", "b", ""], completion_ids=ids) == [1, 0, 1]


def test_a_harness_may_copy_and_pickle_it(address):
    metric = HeadwayMetric(LAST, address)
    for other in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert other({"answer": "3"}, ["3"])["reward"] == 1.0


def test_faulty_graders_and_addresses_are_said_at_once(monkeypatch):
    with pytest.raises(InvalidSpec, match="did you mean"):
        HeadwayMetric({"type": "numerik"})
    with pytest.raises(InvalidSpec, match="http://host:port"):
        HeadwayReward(LAST, "reward.lan:80")
    monkeypatch.setenv("HEADWAY_REWARD", "reward.lan:80")
    with pytest.raises(InvalidSpec, match="http://host:port"):
        HeadwayReward(LAST)


def test_without_an_address_a_service_of_its_own_scores_and_is_started_again(monkeypatch):
    monkeypatch.delenv("HEADWAY_REWARD", raising=False)
    grading = Grading(LAST)
    answers = [
        ScoreItem(None, *pair)
        for pair in (("3", {"answer": "3"}), ("4", {"answer": "3"}), ("4", {}))
    ]
    assert [s.reward for s in grading.score(answers)] == [1.0, 0.0, None]
    own = scoring._links[(os.getpid(), "")][1]
    process = psutil.Process(own._process.pid)
    assert all(
        c.laddr.ip.endswith("127.0.0.1") for c in process.net_connections() if c.status == "LISTEN"
    )
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert [s.reward for s in grading.score(answers)] == [1.0, 0.0, None]
    again = scoring._links[(os.getpid(), "")][1]
    assert again is not own and again.alive
    again.stop()


def test_means_leave_nulls_out():
    assert mean_of_scored([1.0, None, 0.0, math.nan]) == 0.5
    assert math.isnan(mean_of_scored([None])) and math.isnan(mean_of_scored([]))
