"""Who waits for whom, from hand-made tables of what was seen."""

from dataclasses import replace

import pytest

from headway.diagnosis import (
    Finding,
    JobView,
    NodeView,
    StoreView,
    describe_groups,
    diagnose,
    is_stuck,
)
from headway.ledger.api import LeaseView, LedgerView
from headway.waits import Wait

# Step 40 is next (the 41st), B = 2, eta = 2. Ticket 331 began at version 38: due at step 40.
HELD = LeaseView(331, "r2", start_version=38, attempt=1, held_s=93.2, left_s=20.0)
YOUNG = LeaseView(340, "r1", start_version=40, attempt=1, held_s=2.0, left_s=28.0)
LEDGER = LedgerView(
    step=40, batch_groups=2, max_policy_lag=2, closed=False, issued=4,
    leases=(HELD, YOUNG), deadlines={331: 40, 338: 41, 339: 41, 340: 42}, arrived=(338, 339),
)  # fmt: skip
LEARNER = NodeView("l1", "learner", 0.4, "running", version=40, unchanged_s=93.0)
R1 = NodeView("r1", "rollout", 0.5, "running", version=40)
R2 = NodeView("r2", "rollout", 0.3, "running", version=40)
REWARD = NodeView("s1", "reward", 0.2)
JOB = JobView(
    "j", "running", step=40, total_steps=100, learner="l1", rollouts=("r1", "r2"),
    nodes=(LEARNER, R1, R2, REWARD), ledger=LEDGER, members={"r1": 40, "r2": 40},
)  # fmt: skip


def with_node(node: NodeView, job: JobView = JOB) -> JobView:
    others = tuple(n for n in job.nodes if n.node_id != node.node_id)
    return replace(job, nodes=(*others, node))


def waiting(node: NodeView, reason: str, waited_s: float, detail: str = "", job_id: str = "j"):
    return replace(node, waits=(Wait(reason, detail, waited_s, job_id),))


def calm(job: JobView = JOB) -> JobView:
    return with_node(replace(LEARNER, unchanged_s=3.0), job)


def test_the_wait_of_a_step_names_the_ticket_the_node_and_the_version():
    text, holders = describe_groups(LEDGER, 93.4)
    assert text == (
        "step 41 waits for ticket 331 on node r2, 93 s, started at version 38"
        " (it waits 93 s; 2 of 2 groups are here)"
    )
    assert holders == (HELD,)


def test_where_no_ticket_is_needed_more_than_another_all_are_named():
    view = replace(LEDGER, deadlines={331: 42, 338: 42, 340: 42}, arrived=(338,))
    text, holders = describe_groups(view, 12.0)
    assert text == (
        "step 41 waits, 12 s: 1 of 2 groups are here, 2 tickets are under way (1 on r1, 1 on r2),"
        " the longest is ticket 331 on node r2, 93 s"
    )
    assert holders == (HELD, YOUNG)


@pytest.mark.parametrize(
    ("issued", "why"), [(4, "no node has claimed any"), (0, "no ticket is issued")]
)
def test_where_nobody_works_it_says_so(issued, why):
    view = replace(LEDGER, leases=(), deadlines={}, arrived=(), issued=issued)
    text, holders = describe_groups(view, 30.0)
    assert text == f"step 41 waits, 30 s: 0 of 2 groups are here, nothing is under way and {why}"
    assert holders == ()


def test_a_long_list_of_holders_is_cut():
    leases = tuple(replace(HELD, ticket_id=i) for i in range(8))
    view = replace(LEDGER, leases=leases, deadlines=dict.fromkeys(range(8), 40), arrived=())
    text, holders = describe_groups(view, 1.0)
    assert "ticket 4 on node r2" in text and "ticket 5" not in text and "and 3 more" in text
    assert len(holders) == 8


def test_a_job_that_moves_is_healthy():
    findings = diagnose(calm())
    assert findings == (Finding("ok", "job", "job j is running at step 40 of 100"),)
    assert not is_stuck(findings)


def test_a_stopped_node_is_named_by_the_step_by_its_silence_and_by_its_lease():
    job = with_node(replace(R2, silence_s=92.0), with_node(waiting(LEARNER, "groups", 93.0)))
    findings = diagnose(job, limit_s=60.0)
    assert [(f.level, f.who, f.waited_s) for f in findings] == [
        ("stuck", "ledger", 93.2), ("stuck", "l1", 93.0), ("stuck", "r2", 92.0),
    ]  # fmt: skip
    assert findings[0].text == (
        "ticket 331 is on node r2 (attempt 1, started at version 38), 93 s; the node is silent,"
        " the lease ends in 20 s"
    )
    assert findings[1].text.startswith("step 41 waits for ticket 331 on node r2, 93 s")
    assert findings[2].text == "rollout r2 has not been heard for 92 s"
    assert is_stuck(findings) and not is_stuck(diagnose(job, limit_s=100.0))


@pytest.mark.parametrize(
    ("node", "text", "level"),
    [
        (waiting(LEARNER, "publish", 25.0, "step 41 waits for version 40"), "version 40", "waits"),
        (waiting(LEARNER, "peer", 80.0, "cannot reach Redis"), "cannot reach Redis", "stuck"),
        (waiting(LEARNER, "checkpoint", 61.0), "waits for checkpoint", "stuck"),
        (replace(LEARNER, unchanged_s=61.0), "trains step 41 and has said nothing new", "stuck"),
        (
            waiting(R1, "schedule", 500.0, "idle at version 40: the schedule is full"),
            # (F) at version 40: 2 * (42 - 40 + 1) - 4 started = 2
            "the schedule is full (at version 40 the lag rule leaves room for 2 more; the next"
            " step is 41)",
            "ok",
        ),
        (waiting(R1, "weights", 70.0, "has no weights yet"), "r1: has no weights yet", "stuck"),
        (waiting(R1, "scores", 30.0, "3 tickets have no scores"), "3 tickets have no", "waits"),
        (waiting(R1, "sampling", 500.0, "samples 2 tickets"), "samples 2 tickets", "ok"),
        (replace(R1, draining=True), "rollout r1 drains", "waits"),
        (replace(R1, phase="failed", detail="out of memory"), "gave the job up: out of", "stuck"),
        (waiting(R1, "engine", 600.0, "starting the engine"), "starting the engine", "waits"),
        (waiting(R1, "engine", 901.0, "starting the engine"), "starting the engine", "stuck"),
        (waiting(REWARD, "queue", 70.0, "scores 9 items"), "reward s1: scores 9 items", "stuck"),
    ],
)
def test_each_process_says_what_it_waits_for(node, text, level):
    found = diagnose(with_node(node, calm()))
    [finding] = [f for f in found if text in f.text]
    assert (finding.level, finding.who) == (level, node.node_id)


def test_a_learner_waits_as_long_for_nodes_as_their_engines_may_take():
    alone = with_node(waiting(LEARNER, "nodes", 600.0))
    assert is_stuck(diagnose(alone))
    assert not is_stuck(diagnose(with_node(waiting(R1, "engine", 600.0), alone)))
    starting = replace(JOB, state="starting")
    assert not is_stuck(diagnose(with_node(replace(LEARNER, unchanged_s=600.0), starting)))
    assert is_stuck(diagnose(with_node(replace(LEARNER, unchanged_s=901.0), starting)))


def test_waits_of_other_jobs_are_not_this_ones():
    assert len(diagnose(with_node(waiting(REWARD, "queue", 70.0, "x", "other"), calm()))) == 1
    assert is_stuck(diagnose(with_node(waiting(REWARD, "peer", 70.0, "x", ""), calm())))


@pytest.mark.parametrize(
    ("store", "text", "level"),
    [
        (StoreView(error="cannot reach Redis at h:1"), "cannot reach Redis at h:1", "stuck"),
        (StoreView(used_bytes=100, max_bytes=100), "100 of 100 bytes: nothing is issued", "stuck"),
        (StoreView(used_bytes=95, max_bytes=100), "holds 95 of 100 bytes", "waits"),
        (StoreView(answer_s=1.5), "took 1.5 s to answer", "waits"),
    ],
)
def test_redis_that_is_away_full_or_slow(store, text, level):
    [finding] = [f for f in diagnose(replace(calm(), store=store)) if f.who == "redis"]
    assert text in finding.text and finding.level == level


def test_a_queued_job_says_what_it_lacks():
    job = JobView("j", "queued", 0, 5, waiting_for="a free learner")
    [finding] = diagnose(job)
    assert finding == Finding("stuck", "job", "job j is queued and waits for a free learner")


def test_an_ended_job_waits_for_nobody():
    job = replace(JOB, state="failed", error="loss is NaN")
    assert diagnose(job) == (Finding("ok", "job", "job j failed at step 40 of 100: loss is NaN"),)


def test_missing_processes_and_overdue_leases_are_stuck():
    job = replace(calm(), nodes=tuple(n for n in calm().nodes if n.node_id != "r2"))
    assert ("stuck", "r2", "r2 has the job and is not in touch") in [
        (f.level, f.who, f.text) for f in diagnose(job)
    ]
    overdue = replace(LEDGER, leases=(replace(YOUNG, left_s=-7.0),))
    [finding] = [f for f in diagnose(replace(calm(), ledger=overdue)) if f.who == "ledger"]
    assert finding.level == "stuck" and "ran out 7 s ago" in finding.text


@pytest.mark.parametrize("kind", ["weights_missed", "weights_refused"])
def test_a_node_that_is_left_out_is_named_until_it_has_the_newest_version(kind):
    lost = {"kind": kind, "node_id": "r2", "message": "node r2 is left out: digest"}
    back = {"kind": "weights_caught_up", "node_id": "r2"}
    behind = replace(calm(), members={"r1": 40, "r2": 38}, events=(lost,))
    out = diagnose(behind)
    assert [(f.level, f.who, f.text) for f in out] == [("waits", "r2", lost["message"])]
    for job in (
        replace(behind, events=(lost, back)),
        replace(behind, members={"r1": 40, "r2": 40}),
        replace(behind, members={"r1": 40}),  # it serves the job no longer
    ):
        assert [f.level for f in diagnose(job)] == ["ok"]
