"""A step's figures, with numbers worked out by hand."""

import pytest

from headway.errors import JobFailed
from headway.ledger.api import Counts
from headway.messages import Completion, Group, Ticket, VersionSpan
from services.learner.metrics import (
    Busy,
    NodeReading,
    group_metrics,
    lag_metrics,
    ledger_metrics,
    rollout_metrics,
)
from services.learner.sampling_watch import SamplingWatch
from services.learner.watch import RewardWatch, reward_errors, top_reasons


def completion(*spans, reward=1.0, finish="stop"):
    length = spans[-1][2]
    return Completion(
        token_ids=tuple(range(length)),
        logprobs=(-1.0,) * length,
        finish_reason=finish,
        spans=tuple(VersionSpan(*span) for span in spans),
        text="",
        reward=reward,
    )


def group(*completions):
    return Group(Ticket(0, (1, 2, 3), "q", {}, 2, 0), completions, "n", 1, 0, 2.0, 0.5)


def test_lag_is_split_into_in_flight_and_in_queue():
    # trained at version 5: four tokens of version 2 and two of 3 in a group finished at 3,
    # and two tokens of version 5 in another
    groups = [
        group(completion((2, 0, 3), (3, 3, 5)), completion((2, 0, 1))),
        group(completion((5, 0, 2))),
    ]
    row = lag_metrics(5, groups)
    assert row["lag/mean"] == (4 * 3 + 2 * 2 + 0) / 8
    assert row["lag/max"] == 3
    assert row["lag/in_flight_mean"] == 4 / 8
    assert row["lag/in_queue_mean"] == 6 * 2 / 8
    assert row["lag/mean"] == row["lag/in_flight_mean"] + row["lag/in_queue_mean"]


def test_a_batch_in_numbers():
    row = group_metrics(
        [
            group(
                completion((0, 0, 4), reward=0.25, finish="length"),
                completion((0, 0, 1), (1, 1, 2), reward=None),
            )
        ]
    )
    assert row["critic/score/mean"] == row["critic/score/max"] == 0.25  # a null is no zero
    assert (row["response_length/mean"], row["response_length/max"]) == (3.0, 4.0)
    assert row["response_length/clip_ratio"] == 0.5
    assert row["response/mixed_versions_ratio"] == 0.5
    assert row["prompt_length/mean"] == 3.0


def test_busy_fractions_are_of_the_time_since_the_last_reading():
    busy = Busy()
    busy.seconds = 5.0
    busy.start(100.0)
    busy.seconds += 3.0
    assert busy.fraction(104.0) == 0.75
    assert busy.fraction(105.0) == 0.0
    before = {"a": NodeReading(0.0, 1.0, 100), "b": NodeReading(0.0, 0.0, 0)}
    after = {
        "a": NodeReading(4.0, 3.0, 500),
        "b": NodeReading(2.0, 2.0, 100),
        "new": NodeReading(9.0, 9.0, 9),
    }
    row = rollout_metrics(before, after)
    assert row == {"pool/rollout_busy": 0.75, "rollout/tokens_per_s": 150.0}
    assert rollout_metrics(after, {"a": NodeReading(5.0, 0.1, 3)}) == {}  # it was restarted


def counts(delivered=0, consumed=0, **reasons):
    return Counts(99, 0, 0, delivered, 0, consumed, 0, 0, 0, 0, 0, 0, 0, reasons=reasons)


def test_ledger_counts_have_names():
    row = ledger_metrics(counts(delivered=2, consumed=4, zero_variance=3))
    assert (row["ledger/delivered"], row["ledger/consumed"]) == (2.0, 4.0)
    assert row["ledger/reason/zero_variance"] == 3.0


def test_s043_rewards_that_stay_bad_end_the_job_and_some_bad_ones_do_not():

    assert reward_errors({"zero_variance": 5, "reward_timeout": 2, "reward_error:crash": 1}) == 3
    watch = RewardWatch(batch_groups=2, fail_at_once=False)  # patience: 4 batches, 8 groups
    watch.start(counts())
    assert watch.look(counts(reward_timeout=7)) == 7
    assert watch.look(counts(delivered=1, reward_timeout=9)) == 2  # a good one in between
    assert watch.look(counts(delivered=1, reward_timeout=14)) == 5
    assert watch.look(counts(delivered=1, zero_variance=50, reward_timeout=14)) == 0
    with pytest.raises(JobFailed, match=r"8 groups in a row.*reward_timeout: 15"):
        watch.look(counts(delivered=1, reward_timeout=15))
    strict = RewardWatch(batch_groups=2, fail_at_once=True)
    with pytest.raises(JobFailed):
        strict.look(counts(delivered=5, reward_crash=1))


def test_groups_without_variance_end_the_job_after_so_many_rounds():
    # batches of 4, at most 3 rounds: 12 groups into fewer than 4 good ones are too many
    watch = SamplingWatch(batch_groups=4, max_num_gen_batches=3)
    watch.start(counts(consumed=8, zero_variance=100))
    watch.look(counts(consumed=8, delivered=3, zero_variance=108))  # 11 groups
    watch.look(counts(consumed=12, zero_variance=109))  # a batch: a new round begins
    watch.look(counts(consumed=12, delivered=1, zero_variance=119))
    with pytest.raises(JobFailed, match=r"last 12 groups 11 had equal rewards.* = 3 rounds"):
        watch.look(counts(consumed=12, delivered=1, zero_variance=120))
    fresh = SamplingWatch(batch_groups=4, max_num_gen_batches=1)
    fresh.start(counts())
    with pytest.raises(JobFailed, match=r"algorithm\.max_num_gen_batches = 1 "):
        fresh.look(counts(zero_variance=4))


def test_the_most_frequent_reasons_are_named():
    reasons = {"a": 1, "reward_error:timeout": 2, "zero_variance": 5, "late": 3}
    assert top_reasons(reasons) == "zero_variance: 5, late: 3, reward_error:timeout: 2"
    assert top_reasons(reasons, "reward") == "reward_error:timeout: 2"
