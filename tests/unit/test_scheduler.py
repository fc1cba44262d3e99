"""The plan: pure values in, decisions out."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.jobs import JobError, JobRecord
from services.coordinator.decisions import (
    AddRollouts,
    Adopt,
    Cancel,
    DropRollout,
    End,
    LoseLearner,
    LoseRollout,
    Progress,
    Running,
    Start,
    Wait,
)
from services.coordinator.fleet import FleetRegistry, JobReport, Node
from services.coordinator.scheduler import missing_for, plan


def job(job_id="j", state="queued", *, min_nodes=1, max_nodes=None, **changes) -> JobRecord:
    spec = {
        "trainer": {"total_training_steps": 10},
        "rollout": {"min_nodes": min_nodes, "max_nodes": max_nodes},
    }
    return JobRecord(job_id, spec, "digest", 1.0, 1.0, state=state, **changes)


def node(node_id, *reports, heard_at=1.0, **changes) -> Node:
    role = {"l": "learner", "r": "rollout", "s": "reward"}[node_id[0]]
    return Node(node_id, role, f"host:{node_id}", heard_at=heard_at, reports=reports, **changes)


def says(phase, job_id="j", **more) -> JobReport:
    return JobReport(job_id, phase, **more)


REWARD = node("s0")


def settle(jobs, nodes, expected=frozenset()):
    """Plans and applies until nothing is left; the jobs that are left, and all decisions."""
    records = {j.job_id: j for j in jobs}
    taken = []
    for _ in range(50):
        active = [j for j in records.values() if not j.ended]
        decisions = plan(active, nodes, expected)
        if not decisions:
            return records, taken
        for decision in decisions:
            change = decision.apply(records[decision.job_id], 2.0)
            assert change is not None, f"{decision} does not fit {records[decision.job_id]}"
            records[decision.job_id] = change.record
        taken += decisions
    raise AssertionError(f"never settles: {decisions}")


# -- starting ------------------------------------------------------------------------


def test_a_queued_job_starts_with_a_learner_its_nodes_and_a_reward_service():
    fleet = [node("l1"), node("r1"), node("r2"), REWARD]
    assert plan([job(min_nodes=2)], fleet) == [Start("j", "l1", ("r1", "r2"))]


def test_what_is_missing_is_said_once():
    records, decisions = settle([job(min_nodes=2)], [node("r1")])
    text = "a free learner and 1 more free rollout nodes and a reward service"
    assert decisions == [Wait("j", text)]
    assert records["j"].waiting_for == text


def test_first_come_first_served_and_the_rest_waits_its_turn():
    fleet = [node("l1"), node("l2"), node("r1"), node("r2"), node("r3"), REWARD]
    running = job("a", "running", learner="l1", rollouts=("r1",))
    records, decisions = settle([running, job("b", min_nodes=3), job("c")], fleet)
    # b fits the fleet, so r2 and r3 are kept for it: c does not overtake, a does not grow.
    assert records["b"].waiting_for == "1 more free rollout nodes"
    assert records["c"].waiting_for == "its turn"
    assert not any(isinstance(d, Start | AddRollouts) for d in decisions)


def test_a_job_that_no_idle_fleet_could_run_holds_nobody_up():
    fleet = [node("l1"), node("r1"), REWARD]
    records, _ = settle([job("a", min_nodes=5), job("b")], fleet)
    assert (records["a"].state, records["b"].state) == ("queued", "starting")


def test_nodes_left_over_join_the_job_with_the_fewest_up_to_max_nodes():
    fleet = [node("l1"), node("l2"), *(node(f"r{i}") for i in range(7)), REWARD]
    records, _ = settle([job("a", min_nodes=2, max_nodes=2), job("b")], fleet)
    assert len(records["a"].rollouts) == 2
    assert len(records["b"].rollouts) == 5


def test_a_late_node_joins_the_running_job():
    running = job(state="running", learner="l1", rollouts=("r1",))
    fleet = [node("l1", says("running")), node("r1", says("running")), node("r2"), REWARD]
    (decision,) = plan([running], fleet)
    change = decision.apply(running, 5.0)
    assert change.record.rollouts == ("r1", "r2")
    assert [(e.kind, e.fields["node_id"]) for e in change.events] == [("member_joined", "r2")]


def test_no_work_for_nodes_that_drain_are_unheard_or_have_not_forgotten_the_last_job():
    for rollout in (
        node("r1", draining=True),
        node("r1", heard_at=None),
        node("r1", says("running", "old")),
    ):
        records, _ = settle([job()], [node("l1"), rollout, REWARD])
        assert records["j"].waiting_for == "1 more free rollout nodes"
    records, _ = settle([job()], [node("l1"), node("r1", says("succeeded", "old")), REWARD])
    assert records["j"].state == "starting"


# -- what the learner says -----------------------------------------------------------


def test_the_learner_runs_progresses_and_ends():
    started = job(state="starting", learner="l1", rollouts=("r1",), attempt=1)
    report = says("running", version=0, run_dir="/runs/j")
    fleet = [node("l1", report), node("r1"), REWARD]
    assert plan([started], fleet) == [Running("j"), Progress("j", 0, "/runs/j")]
    running = replace(started, state="running", run_dir="/runs/j")
    fleet[0] = node("l1", replace(report, version=4))
    assert plan([running], fleet) == [Progress("j", 4, "/runs/j")]
    fleet[0] = node("l1", replace(report, phase="succeeded", version=10))
    assert plan([running], fleet) == [End("j", "succeed", None, 10, "/runs/j")]
    fleet[0] = node("l1", replace(report, phase="failed", error_kind="diverged", detail="NaN"))
    records, _ = settle([running], fleet)
    assert records["j"].state == "failed"
    assert records["j"].error == JobError("diverged", "NaN")


def test_a_missing_version_is_not_a_zero():
    running = job(state="running", learner="l1", rollouts=("r1",), step=7)
    assert plan([running], [node("l1", says("running")), node("r1"), REWARD]) == []


def test_an_ended_jobs_nodes_go_to_the_next():
    first = job("a", "running", learner="l1", rollouts=("r1",))
    fleet = [node("l1", says("succeeded", "a")), node("r1"), REWARD]
    records, _ = settle([first, job("b")], fleet)
    assert (records["a"].state, records["b"].state) == ("succeeded", "starting")
    assert (records["b"].learner, records["b"].rollouts) == ("l1", ("r1",))


# -- losses --------------------------------------------------------------------------


def test_a_lost_rollout_node_leaves_the_record_and_the_job_goes_on():
    running = job(state="running", learner="l1", rollouts=("r1", "r2"))
    fleet = [node("l1", says("running")), node("r1", says("running")), REWARD]
    records, decisions = settle([running], fleet)
    assert [type(d) for d in decisions] == [LoseRollout]
    assert (records["j"].state, records["j"].rollouts) == ("running", ("r1",))


def test_a_job_that_lost_all_its_nodes_waits_and_says_so():
    running = job(state="running", learner="l1", rollouts=("r1",))
    records, _ = settle([running], [node("l1", says("running"))])
    assert records["j"].state == "running"
    assert records["j"].waiting_for == "a rollout node and a reward service"


def test_a_lost_learner_means_another_attempt_elsewhere_with_the_same_rollouts():
    running = job(state="running", learner="l1", rollouts=("r1",), attempt=1, step=6)
    fleet = [node("l2"), node("r1", says("running")), REWARD]
    records, decisions = settle([running], fleet)
    assert [type(d) for d in decisions] == [LoseLearner, Start]
    after = records["j"]
    assert (after.state, after.attempt, after.learner) == ("starting", 2, "l2")
    assert (after.rollouts, after.step, after.lost_learner) == (("r1",), 6, None)


def test_the_third_lost_learner_fails_the_job():
    running = job(state="running", learner="l1", rollouts=("r1",), attempt=3)
    records, _ = settle([running], [node("l2"), node("r1", says("running")), REWARD])
    assert records["j"].state == "failed"
    assert records["j"].error.kind == "node_lost"
    assert "attempt 3 of 3" in records["j"].error.message


def test_attempts_that_came_further_are_not_counted():
    job_ = job(state="running", learner="l1", attempt=9, step=36, best_step=40, best_attempt=6)
    retraced = Progress("j", 40, "").apply(job_, 2.0).record
    assert settle([retraced], [])[0]["j"].error.message.endswith("3 of 3 without a new step")
    further = Progress("j", 41, "").apply(retraced, 2.0).record
    assert (further.best_step, further.best_attempt) == (41, 9)
    assert settle([further], [])[0]["j"].state == "queued"


def test_a_learner_that_comes_back_still_at_work_keeps_its_attempt():
    waiting = job(lost_learner="l1", rollouts=("r1",), attempt=1, step=3)
    fleet = [
        node("l1", says("running", version=5)),
        node("l2"),
        node("r1", says("running")),
        REWARD,
    ]
    assert plan([waiting], fleet) == [Adopt("j", "l1")]
    records, _ = settle([waiting], fleet)
    after = records["j"]
    assert (after.state, after.learner, after.attempt, after.step) == ("running", "l1", 1, 5)


def test_a_learner_that_comes_back_with_the_end_is_believed():
    waiting = job(lost_learner="l1", rollouts=("r1",), attempt=1)
    fleet = [node("l1", says("succeeded", version=10)), node("r1"), REWARD]
    records, _ = settle([waiting], fleet)
    assert (records["j"].state, records["j"].step) == ("succeeded", 10)


def test_a_learner_that_shuts_down_hands_its_job_on():
    running = job(state="running", learner="l1", rollouts=("r1",), attempt=1)
    fleet = [node("l1", says("cancelled"), draining=True), node("l2"), node("r1"), REWARD]
    records, _ = settle([running], fleet)
    assert (records["j"].state, records["j"].learner, records["j"].attempt) == ("starting", "l2", 2)


def test_nobody_is_lost_while_he_may_still_turn_up_after_a_restart():
    running = job(state="running", learner="l1", rollouts=("r1",))
    assert plan([running], [], frozenset({"l1", "r1"})) == []
    assert {type(d) for d in plan([running], [], frozenset({"r1"}))} == {LoseLearner}


# -- rollout nodes that give up ------------------------------------------------------


def test_a_node_that_fails_is_tried_again_once_it_has_forgotten():
    running = job(state="running", learner="l1", rollouts=("r1",))
    crashed = node("r1", says("failed", error_kind="internal", detail="engine died"))
    learner = node("l1", says("running"))
    records, decisions = settle([running], [learner, crashed, REWARD])
    assert isinstance(decisions[0], DropRollout)
    assert records["j"].rollouts == () and records["j"].state == "running"
    records, _ = settle(records.values(), [learner, node("r1"), REWARD])
    assert records["j"].rollouts == ("r1",)
    assert records["j"].rollout_failures["r1"].count == 1


def test_a_hopeless_failure_of_the_only_node_fails_the_job_at_once():
    starting = job(state="starting", learner="l1", rollouts=("r1",))
    crashed = node("r1", says("failed", error_kind="not_found", detail="no model folder /m"))
    records, _ = settle([starting], [node("l1", says("starting")), crashed, REWARD])
    assert records["j"].state == "failed"
    assert records["j"].error.kind == "not_found"
    assert "no model folder /m" in records["j"].error.message


def test_another_node_takes_over_from_a_hopeless_one():
    starting = job(state="starting", learner="l1", rollouts=("r1",))
    crashed = node("r1", says("failed", error_kind="not_found", detail="no model"))
    records, _ = settle([starting], [node("l1"), crashed, node("r2"), REWARD])
    assert (records["j"].state, records["j"].rollouts) == ("starting", ("r2",))


# -- cancelling ----------------------------------------------------------------------


def cancelled_from(record):
    return Cancel("j").apply(record, 3.0).record


def test_a_running_job_ends_when_its_learner_says_so():
    stopping = cancelled_from(job(state="running", learner="l1", rollouts=("r1",)))
    assert stopping.state == "cancelling"
    fleet = [node("l1", says("running")), node("r1", says("running")), REWARD]
    assert plan([stopping], fleet) == []
    fleet[0] = node("l1", says("cancelled", version=4))
    records, _ = settle([stopping], fleet)
    assert (records["j"].state, records["j"].step) == ("cancelled", 4)


def test_cancelling_ends_too_when_the_learner_is_lost_failed_or_never_began():
    stopping = cancelled_from(job(state="running", learner="l1", rollouts=("r1",), attempt=1))
    for fleet in ([], [node("l1", says("failed", detail="killed"))], [node("l1")]):
        records, _ = settle([stopping], [*fleet, node("r1"), REWARD])
        assert records["j"].state == "cancelled"


def test_a_job_that_was_through_before_the_cancel_arrived_succeeded():
    stopping = cancelled_from(job(state="running", learner="l1", rollouts=("r1",)))
    records, _ = settle([stopping], [node("l1", says("succeeded", version=10)), REWARD])
    assert records["j"].state == "succeeded"


# -- the whole -----------------------------------------------------------------------


def test_missing_for_counts_the_living_busy_or_not():
    fleet = [node("l1"), node("r1", says("running")), node("r2", draining=True)]
    assert missing_for(1, [*fleet, REWARD]) == ""
    assert missing_for(2, fleet) == "2 rollout nodes (there are 1) and a reward service"
    assert missing_for(1, []) == "a learner and 1 rollout nodes (there are 0) and a reward service"


PHASES = st.sampled_from(["starting", "running", "succeeded", "failed", "cancelled"])


@st.composite
def worlds(draw):
    names = [f"l{i}" for i in range(3)] + [f"r{i}" for i in range(5)] + ["s0"]
    ids = ["a", "b", "c", "d"]
    some_ids = st.lists(st.sampled_from(ids), max_size=2, unique=True)
    nodes = [
        node(
            name,
            *(says(draw(PHASES), job_id) for job_id in draw(some_ids)),
            draining=draw(st.booleans()),
            heard_at=draw(st.sampled_from([None, 1.0])),
        )
        for name in draw(st.lists(st.sampled_from(names), unique=True))
    ]
    learners, rollouts = ["l0", "l1", "l2"], [f"r{i}" for i in range(5)]
    jobs = []
    for job_id in ids:
        state = draw(st.sampled_from(["queued", "starting", "running", "cancelling"]))
        mine = (
            draw(st.lists(st.sampled_from(rollouts), max_size=2, unique=True)) if rollouts else []
        )
        rollouts = [r for r in rollouts if r not in mine]
        busy = state != "queued" and bool(learners)
        jobs.append(
            job(
                job_id,
                state if busy else "queued",
                min_nodes=draw(st.integers(1, 3)),
                learner=learners.pop() if busy else None,
                lost_learner=None if busy else draw(st.sampled_from([None, "l0", "l1"])),
                rollouts=tuple(mine),
                attempt=draw(st.integers(1, 3)),
            )
        )
    return jobs, nodes


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_any_world_settles_and_no_node_serves_two_jobs(world):
    jobs, nodes = world
    records, _ = settle(jobs, nodes)
    active = [j for j in records.values() if not j.ended]
    learners = [j.learner for j in active if j.learner]
    rollouts = [n for j in active for n in j.rollouts]
    assert len(learners) == len(set(learners)) and len(rollouts) == len(set(rollouts))
    alive = {n.node_id for n in nodes}
    assert {*learners, *rollouts} <= alive
    for left in active:
        assert (left.learner is None) == (left.state == "queued")
        assert left.state == "queued" or left.attempt >= 1


# -- the registry --------------------------------------------------------------------


def test_the_registry_loses_the_silent_and_keeps_the_speaking():
    registry = FleetRegistry(lost_after_s=10.0)
    registry.register(node("r1", heard_at=None), 0.0)
    registry.register(node("r2", heard_at=None), 0.0)
    assert registry.beat("r1", (), False, 8.0) is True  # its first word is news
    assert registry.beat("r1", (), False, 9.0) is False
    assert registry.beat("r1", (says("running"),), False, 9.5) is True
    assert registry.beat("r9", (), False, 9.5) is None
    assert registry.expire(10.0) == []
    assert registry.expire(10.5) == ["r2"]
    assert [n.node_id for n in registry.nodes()] == ["r1"]
    assert registry.silence_s("r1", 12.0) == 2.5


def test_a_second_register_of_the_same_process_forgets_nothing():
    registry = FleetRegistry(10.0)
    first = node("r1", heard_at=None, pid=7)
    registry.register(first, 0.0)
    registry.beat("r1", (says("running"),), False, 1.0)
    assert not registry.restarted(first)
    registry.register(first, 2.0)
    assert registry.nodes()[0].reports == (says("running"),)
    assert registry.restarted(replace(first, pid=8))


def test_the_expected_have_their_time():
    registry = FleetRegistry(10.0)
    registry.expect(["r1", "r2"], 0.0)
    registry.register(node("r1"), 3.0)
    assert registry.expected() == {"r2"}
    registry.expire(10.0)
    assert registry.expected() == {"r2"}
    registry.expire(10.1)
    assert registry.expected() == frozenset()
