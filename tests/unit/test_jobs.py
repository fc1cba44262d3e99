"""Job states: the whole table by hand, and what no order of events may break."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import Conflict, InvalidSpec
from headway.jobs import (
    ENDED,
    STATES,
    JobError,
    JobRecord,
    NodeFailure,
    advance,
    can,
    check_job_id,
    record_from_dict,
    record_to_dict,
    transition,
)

TRIGGERS = ("assign", "run", "lose_learner", "cancel", "stop", "succeed", "fail")
TABLE = {
    "queued": ("starting", None, None, "cancelled", "cancelled", "succeeded", "failed"),
    "starting": (None, "running", "queued", "cancelling", "cancelled", "succeeded", "failed"),
    "running": (None, None, "queued", "cancelling", "cancelled", "succeeded", "failed"),
    "cancelling": (None, None, "cancelled", "cancelling", "cancelled", "succeeded", "cancelled"),
    "succeeded": (None,) * 7,
    "failed": (None,) * 7,
    "cancelled": (None, None, None, "cancelled", None, None, None),
}
SPEC = {
    "trainer": {"total_training_steps": 30},
    "rollout": {"min_nodes": 2, "max_nodes": None},
}


def record(**changes) -> JobRecord:
    plain = {"job_id": "j", "spec": SPEC, "body_digest": "d", "created_at": 1.0, "updated_at": 1.0}
    return JobRecord(**{**plain, **changes})


@pytest.mark.parametrize(("state", "trigger"), list(itertools.product(STATES, TRIGGERS)))
def test_every_pair_of_state_and_trigger(state, trigger):
    expected = TABLE[state][TRIGGERS.index(trigger)]
    assert can(state, trigger) == (expected is not None)
    if expected is None:
        with pytest.raises(Conflict, match=state):
            transition(state, trigger)
    else:
        assert transition(state, trigger) == expected


@given(st.lists(st.sampled_from(TRIGGERS), max_size=12))
def test_an_ended_job_stays_as_it_ended_and_times_are_set_once(triggers):
    job, now = record(), 1.0
    for trigger in triggers:
        now += 1.0
        before = job
        if can(job.state, trigger):
            job = advance(job, trigger, now)
        if before.ended:
            assert job.state == before.state and job.ended_at == before.ended_at
        if before.started_at is not None:
            assert job.started_at == before.started_at
        assert (job.ended_at is not None) == (job.state in ENDED)
        assert job.state != "running" or job.started_at is not None


def test_times_of_a_whole_life():
    job = advance(record(), "assign", 2.0, learner="l", attempt=1)
    assert (job.state, job.started_at, job.learner) == ("starting", None, "l")
    job = advance(job, "run", 3.0)
    assert (job.state, job.started_at, job.updated_at) == ("running", 3.0, 3.0)
    job = advance(job, "lose_learner", 4.0, learner=None, lost_learner="l")
    job = advance(job, "assign", 5.0, learner="m", attempt=2)
    job = advance(job, "run", 6.0)
    assert (job.started_at, job.attempt) == (3.0, 2)
    job = advance(job, "succeed", 7.0)
    assert (job.state, job.created_at, job.ended_at) == ("succeeded", 1.0, 7.0)


def test_the_conflict_names_the_job():
    with pytest.raises(Conflict, match="job j: a job that is failed cannot cancel"):
        advance(record(state="failed", ended_at=2.0), "cancel", 3.0)


def test_what_the_specification_says():
    job = record()
    assert (job.total_steps, job.min_nodes, job.max_nodes) == (30, 2, None)


def test_a_record_survives_its_plain_form_and_later_keys():
    job = record(
        state="failed",
        rollouts=("a", "b"),
        rollout_failures={"c": NodeFailure(3, "memory", "too big")},
        error=JobError("memory", "too big"),
        step=7,
        ended_at=9.0,
    )
    plain = record_to_dict(job)
    assert plain["total_steps"] == 30
    assert plain["error"] == {"kind": "memory", "message": "too big"}
    assert record_from_dict({**plain, "a_key_of_next_year": 1}) == job


@pytest.mark.parametrize("good", ["a", "7", "a-b", "a" * 63, "sum-0f3a9c"])
def test_good_job_ids(good):
    assert check_job_id(good) == good


@pytest.mark.parametrize(
    "bad", ["", "-a", "a-", "A", "a_b", "a.b", "a/b", "..", "a" * 64, "a\n", "ä", "{a}"]
)
def test_bad_job_ids(bad):
    with pytest.raises(InvalidSpec, match="job id"):
        check_job_id(bad)
