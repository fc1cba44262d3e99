"""The steps' watchdog over the in-memory ledger: what it says of a wait, and how often."""

import time

import pytest

from headway.errors import Unauthorized
from headway.jobspec import parse_job
from headway.ledger.api import LedgerConfig, Member
from headway.ledger.memory import MemoryLedger
from headway.patience import _AWAY
from services.learner.status import Reporter
from services.learner.waits import WaitWatch
from tests.support.ledgers import tickets

SPEC = parse_job(
    {
        "model": {"path": "org/name"},
        "data": {"source": "reasoning_gym", "name": "chain_sum", "train_batch_size": 1},
        "reward": {"grader": {"type": "numeric"}},
        "rollout": {"min_nodes": 2},
        "trainer": {"total_training_steps": 3},
    }
)


class Said:
    def __init__(self):
        self.rows = []

    def add(self, kind, message, **fields):
        self.rows.append({"kind": kind, "message": message, **fields})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Refusing(MemoryLedger):
    """A ledger whose user may not look."""

    async def look(self):
        raise Unauthorized("this user has no permissions to run the 'evalsha' command")


async def watch_of(ledger):
    await ledger.open(LedgerConfig(batch_groups=1, max_policy_lag=0))
    await ledger.issue(tickets(0, 1))
    await ledger.claim("r2", 0)
    said, reporter = Said(), Reporter()
    return WaitWatch(SPEC, ledger, said, reporter), said, reporter


def wait_for(watch, seconds):
    """Every wait of the watch has lasted so long."""
    since = watch._waiting._since
    for key, (_, reason, detail) in since.items():
        since[key] = (time.monotonic() - seconds, reason, detail)


async def test_a_wait_for_groups_is_said_once_a_minute_and_named():
    clock = Clock()
    watch, said, reporter = await watch_of(MemoryLedger(clock))
    clock.now = 12.0
    with watch.on("groups", 0):
        wait_for(watch, 9.0)
        await watch.look()
        assert (said.rows, reporter.status.waiting) == ([], "")
        wait_for(watch, 11.0)
        await watch.look()
        await watch.look()
    [row] = said.rows
    assert row["message"] == (
        "step 1 waits for ticket 0 on node r2, 12 s, started at version 0"
        " (it waits 11 s; 0 of 1 groups are here)"
    )
    assert (row["kind"], row["reason"], row["step"]) == ("waiting", "groups", 1)
    assert (row["tickets"], row["nodes"]) == ([0], ["r2"])
    assert (reporter.status.waiting, reporter.status.detail) == ("", "")  # it is over


@pytest.mark.parametrize(
    ("reason", "seconds", "text"),
    [
        ("nodes", 1.1, "waiting for rollout nodes: 1 of 2 here"),
        ("publish", 25.0, "step 3 waits for version 2 to be installed, 25 s, by r1 (at 1)"),
        ("checkpoint", 61.0, "step 3 waits for the checkpoint before it, 61 s"),
    ],
)
async def test_each_kind_of_wait_says_for_whom(reason, seconds, text):
    ledger = MemoryLedger(Clock())
    watch, said, reporter = await watch_of(ledger)
    await ledger.announce(Member("r1", "h:1", "none", 1), 60.0)
    with watch.on(reason, 2):
        wait_for(watch, seconds)
        await watch.look()
        assert (reporter.status.waiting, reporter.status.detail) == (reason, text)
        assert abs(time.time() - reporter.status.waiting_since - seconds) < 30
    assert [row["message"] for row in said.rows] == [text]


async def test_a_peer_that_is_back_is_waited_for_no_longer():
    watch, said, reporter = await watch_of(MemoryLedger(Clock()))
    with _AWAY.on("peer", "cannot reach Redis"):
        for key, (_, reason, detail) in _AWAY._since.items():
            _AWAY._since[key] = (time.monotonic() - 30.0, reason, detail)
        await watch.look()
        assert reporter.status.waiting == "peer"
    await watch.look()
    assert (reporter.status.waiting, reporter.status.detail) == ("", "")
    text = "step 1 waits for a peer, 30 s: cannot reach Redis"
    assert [row["message"] for row in said.rows] == [text]


async def test_a_ledger_that_does_not_answer_ends_no_watch():
    watch, said, _ = await watch_of(Refusing(Clock()))
    with watch.on("groups", 0):
        wait_for(watch, 20.0)
        await watch.look()
    assert [row["message"] for row in said.rows] == ["step 1 waits for groups, 20 s"]
