"""Behaviours seen to go wrong in the field (shared/cases), on every ledger."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from headway.ledger.api import Lease, Ledger, LedgerConfig
from headway.ledger.redis_ledger import RedisLedger
from headway.redis_client import command, connect
from tests.support.ledger_worker import Worker
from tests.support.ledgers import Stand, ids, tickets


@dataclass
class Node:
    """A rollout worker in ticks: one ticket at a time, `ticks(ticket id)` long."""

    node_id: str
    slow: int = 1
    long_ids: frozenset[int] = frozenset()
    lease: Lease | None = None
    left: int = 0

    async def tick(self, ledger: Ledger, version: int) -> None:
        if self.lease is None:
            claimed = await ledger.claim(self.node_id, version)
            if not claimed.leases:
                return
            self.lease = claimed.leases[0]
            self.left = self.slow * (20 if ids(claimed)[0] in self.long_ids else 1)
        self.left -= 1
        if self.left == 0:
            await ledger.deliver(self.lease, b"%d" % self.lease.start_version)
            self.lease = None


@dataclass
class Run:
    """A job in ticks; `trained` holds, per step, ticket id -> version it was started at."""

    nodes: list[Node]
    num_tickets: int = 10**9
    next_ticket: int = 0
    trained: list[dict[int, int]] = field(default_factory=list)
    num_waits: int = 0

    async def until(self, ledger: Ledger, num_steps: int) -> None:
        for _ in range(10_000):
            if len(self.trained) == num_steps:
                return
            await self._feed(ledger)
            for node in self.nodes:
                await node.tick(ledger, len(self.trained))
            await self._train(ledger)
        raise AssertionError(f"stuck before step {len(self.trained)}: {await ledger.counts()}")

    async def _feed(self, ledger: Ledger) -> None:
        wanted = tickets(self.next_ticket, min(self.next_ticket + 4, self.num_tickets))
        self.next_ticket += await ledger.issue(wanted)

    async def _train(self, ledger: Ledger) -> None:
        step = len(self.trained)
        taken = await ledger.take(step)
        if taken.ticket_ids is None:
            self.num_waits += bool(taken.waiting_for)
            return
        started = [int(payload) for payload in await ledger.payloads(taken.ticket_ids)]
        self.trained.append(dict(zip(taken.ticket_ids, started, strict=True)))
        await ledger.commit(step, taken.ticket_ids)


@pytest.mark.parametrize("on_late", ["wait", "drop"])
async def test_s003_queue_time_counts_as_lag(stand: Stand, on_late):
    """Lag 1, one worker ten times slower than three others; steps need its groups."""
    config = LedgerConfig(batch_groups=2, max_policy_lag=1, on_late=on_late)
    await stand.ledger.open(config)
    run = Run([Node("slow", slow=10), Node("a"), Node("b"), Node("c")])
    await run.until(stand.ledger, 30)
    lags = {step - version for step, batch in enumerate(run.trained) for version in batch.values()}
    assert lags == {0, 1}  # groups did wait, and never past the bound
    counts = await stand.ledger.counts()
    assert counts.conserved and counts.consumed == 60
    if on_late == "wait":
        assert counts.dropped == 0 and counts.stalled_steps > 0 and run.num_waits > 0
        trained = {ticket for batch in run.trained for ticket in batch}
        assert trained >= set(range(50))  # the slow worker's groups are not lost
    else:
        assert counts.dropped > 0 and counts.reasons == {"late": counts.dropped}
        assert counts.refused_deliveries > 0


async def test_s027_prompts_in_flight_are_issued_again_after_a_resume(stand: Stand):
    """100 prompts, 10 of them 20 times longer; everything dies 5 times in one epoch."""
    long_ids = frozenset(range(3, 100, 10))
    await stand.ledger.open(LedgerConfig(batch_groups=5, max_policy_lag=2, max_attempts=10))
    run = Run([], num_tickets=100)
    for crash in range(6):
        nodes = [Node(f"{name}{crash}", long_ids=long_ids) for name in "abc"]
        learner = stand.another_process()
        await learner.open(LedgerConfig(batch_groups=5, max_policy_lag=2, max_attempts=10))
        run.nodes = nodes
        run.next_ticket = (await learner.counts()).issued_total
        await run.until(learner, 20 if crash == 5 else 3 * (crash + 1))
        await stand.run_out()  # the nodes died with their leases
    trained = [ticket for batch in run.trained for ticket in batch]
    assert sorted(trained) == list(range(100))
    counts = await stand.ledger.counts()
    assert counts.expired_leases >= 5 and counts.abandoned == 0
    assert (counts.consumed, counts.conserved) == (100, True)


@pytest.fixture
def workers(store_url, job_id):
    """Starts worker processes on one server's ledger; ends them after the test."""
    started: list[Worker] = []

    def start(node_id: str, clock_offset_s: float = 0.0) -> Worker:
        started.append(Worker(store_url, job_id, node_id, clock_offset_s))
        return started[-1]

    yield start
    for worker in started:
        worker.process.send_signal(signal.SIGCONT)
        worker.end()


async def deliver_when_free(worker: Worker) -> None:
    """Claims until the ledger grants a ticket, and delivers it within the lease."""
    while True:
        if await worker.ask("claim") and await worker.ask("deliver"):
            return
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("fault", ["stopped", "cut off"])
async def test_s035_a_late_completion_is_refused(store_url, job_id, workers, fault):
    """A worker stops (or loses its link) for longer than its lease, then delivers."""
    client = connect(store_url)
    ledger = RedisLedger(client, job_id)
    await ledger.open(LedgerConfig(1, 0, lease_s=0.3, max_attempts=1000))
    await ledger.issue(tickets(0, 1))
    late, other = workers("late"), workers("other")
    assert await late.ask("claim") == [0]
    if fault == "stopped":
        late.process.send_signal(signal.SIGSTOP)
    else:
        await command(client, "CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")
    await deliver_when_free(other)
    late.process.send_signal(signal.SIGCONT)
    assert await late.ask("deliver") is False
    assert await late.ask("renew") == 0
    assert (await ledger.take(0)).ticket_ids == (0,)
    assert await ledger.payloads([0]) == [b"other"]
    counts = await ledger.counts()
    assert counts.expired_leases >= 1 and counts.refused_deliveries >= 1
    await client.aclose()


async def test_s039_only_the_stores_clock_judges_leases(store_url, job_id, workers):
    """One worker's clocks are ten minutes ahead, another's ten minutes behind."""
    client = connect(store_url)
    ledger = RedisLedger(client, job_id)
    await ledger.open(LedgerConfig(2, 0, lease_s=0.5, max_attempts=1000))
    await ledger.issue(tickets(0, 2))
    nodes = [workers("ahead", 600.0), workers("behind", -600.0), workers("right")]
    grants: dict[int, list[tuple[float, float]]] = {0: [], 1: []}  # between which two moments
    while min(map(len, grants.values())) < 3:  # each lease runs out, whoever has it
        for node in nodes:
            before = await server_time(client)
            for ticket in await node.ask("claim"):
                grants[ticket].append((before, await server_time(client)))
    for moments in grants.values():
        gaps = [new[1] - old[0] for old, new in pairwise(moments)]
        assert min(gaps) >= 0.5  # never two holders at once
    waiting = (await ledger.take(0)).waiting_for
    assert all(0 <= holder.held_s < 600 for holder in waiting)
    counts = await ledger.counts()
    assert counts.expired_leases >= 4 and counts.conserved
    await client.aclose()


async def server_time(client) -> float:
    seconds, micros = await command(client, "TIME")
    return int(seconds) + int(micros) / 1e6
