"""Any sequence of calls: the scripts answer as the reference does, and the invariants hold."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headway.errors import HeadwayError
from headway.ledger.api import ClaimResult, Lease, Ledger, LedgerConfig, TakeResult
from headway.redis_client import connect
from headway.rl.schedule import feasible
from tests.support.ledgers import MemoryStand, RedisStand, tickets

CONFIGS = st.builds(
    LedgerConfig,
    batch_groups=st.integers(1, 3),
    max_policy_lag=st.integers(0, 3),
    on_late=st.sampled_from(["wait", "mask", "drop"]),
    lease_s=st.just(3600.0),
    max_attempts=st.integers(1, 3),
    max_outstanding_groups=st.sampled_from([0, 3, 7]),
    max_outstanding_bytes=st.sampled_from([40, 1 << 30]),
)


class LedgerMachine(RuleBasedStateMachine):
    """Makes each call on the reference and on a server, and compares."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client = connect(url)
        self.reference = MemoryStand()
        self.server = RedisStand(self.client, f"machine-{uuid.uuid4().hex[:12]}")
        self.leases: list[Lease] = []  # all ever granted, oldest first
        self.started: dict[int, int] = {}  # ticket -> version of its last claim
        self.batches: list[tuple[int, ...]] = []
        self.num_committed = 0
        self.num_trimmed = 0
        self.closed = False

    def both(self, call: Callable[[Ledger], Awaitable[Any]]) -> Any:
        answers = [self.runner.run(outcome(call, s.ledger)) for s in (self.reference, self.server)]
        assert timeless(answers[0]) == timeless(answers[1])
        return answers[1]

    @initialize(config=CONFIGS)
    def open(self, config: LedgerConfig) -> None:
        self.config = config.checked()
        self.both(lambda ledger: ledger.open(config))
        self.both(lambda ledger: ledger.issue(tickets(0, 5)))

    @rule(num=st.integers(4, 9))
    def feed(self, num: int) -> None:
        total = self.both(lambda ledger: ledger.counts()).issued_total
        self.both(lambda ledger: ledger.issue(tickets(total, total + num)))

    @rule(num=st.integers(1, 8), back=st.integers(-1, 2))
    def issue(self, num: int, back: int) -> None:
        total = self.both(lambda ledger: ledger.counts()).issued_total
        first = max(0, total - back)
        self.both(lambda ledger: ledger.issue(tickets(first, first + num)))

    @rule(node=st.sampled_from("ab"), age=st.integers(-1, 4), limit=st.integers(1, 4))
    def claim(self, node: str, age: int, limit: int) -> None:
        version = len(self.batches) - age
        before = self.both(lambda ledger: ledger.counts())
        claimed = self.both(lambda ledger: ledger.claim(node, version, limit))
        if not isinstance(claimed, ClaimResult):
            assert version < 0 or version > len(self.batches)
            return
        assert bool(claimed.leases) == (claimed.refusal is None)
        for lease in claimed.leases:
            assert lease.attempt <= self.config.max_attempts
            self.leases.append(lease)
            self.started[lease.ticket.ticket_id] = version
        if claimed.refusal == "bytes":
            assert before.payload_bytes >= self.config.max_outstanding_bytes
        if claimed.refusal in ("bytes", "lag"):
            assert before.leased + before.delivered >= self.config.batch_groups

    @rule(limit=st.integers(1, 6), kept=st.integers(0, 2), first=st.booleans())
    def work(self, limit: int, kept: int, first: bool) -> None:
        """A lively node claims at the newest version and delivers all but `kept`."""
        version = len(self.batches)
        claimed = self.both(lambda ledger: ledger.claim("c", version, limit))
        self.leases += claimed.leases
        self.started |= dict.fromkeys((x.ticket.ticket_id for x in claimed.leases), version)
        done = claimed.leases[kept:] if first else claimed.leases[: len(claimed.leases) - kept]
        for lease in done:
            self.deliver_one(lease)

    def deliver_one(self, lease: Lease) -> None:
        assert self.both(lambda ledger: ledger.deliver(lease, b"done")) or self.closed

    @precondition(lambda self: self.leases)
    @rule(
        back=st.integers(0, 6),
        size=st.integers(0, 30),
        reason=st.sampled_from(["", "", "", "dull"]),
    )
    def deliver(self, back: int, size: int, reason: str) -> None:
        lease = self.leases[max(0, len(self.leases) - 1 - back)]
        self.both(lambda ledger: ledger.deliver(lease, b"\0" * size, reason))

    @precondition(lambda self: self.leases)
    @rule(back=st.integers(0, 6), how=st.sampled_from(["fail", "release"]))
    def hand_back(self, back: int, how: str) -> None:
        lease = self.leases[max(0, len(self.leases) - 1 - back)]
        if how == "fail":
            self.both(lambda ledger: ledger.fail(lease, "broken"))
        else:
            self.both(lambda ledger: ledger.release(lease))

    @rule(num=st.integers(0, 6))
    def renew(self, num: int) -> None:
        some = tuple(self.leases[-num:]) if num else ()
        self.both(lambda ledger: ledger.renew("a", some))

    @rule()
    def run_out(self) -> None:
        self.runner.run(self.reference.run_out())
        self.runner.run(self.server.run_out())

    @rule()
    def take(self) -> None:
        step = len(self.batches)
        taken = self.both(lambda ledger: ledger.take(step))
        if taken.ticket_ids is None:
            return
        assert len(taken.ticket_ids) == self.config.batch_groups
        assert not taken.late or self.config.on_late == "mask"
        for ticket in set(taken.ticket_ids) - taken.late:
            assert 0 <= step - self.started[ticket] <= self.config.max_policy_lag
        self.batches.append(taken.ticket_ids)
        self.both(lambda ledger: ledger.payloads(taken.ticket_ids))

    @rule(back=st.integers(-1, 4).filter(bool))
    def take_another_step(self, back: int) -> None:
        step = max(0, len(self.batches) - back)
        if step == len(self.batches):
            return
        taken = self.both(lambda ledger: ledger.take(step))
        if self.num_trimmed <= step < len(self.batches):
            assert taken.replayed and taken.ticket_ids == self.batches[step]
        else:
            assert taken in ("NotFound", "LedgerViolation")

    @precondition(lambda self: self.num_committed < len(self.batches))
    @rule()
    def commit(self) -> None:
        step = self.num_committed
        self.both(lambda ledger: ledger.commit(step, self.batches[step]))
        self.num_committed += 1

    @rule(back=st.integers(-2, 3), wrong=st.booleans())
    def commit_another_step(self, back: int, wrong: bool) -> None:
        step = max(0, self.num_committed - back)
        if step == self.num_committed and not wrong:
            return
        ids = self.batches[step] if step < len(self.batches) and not wrong else (0, 0)
        answer = self.both(lambda ledger: ledger.commit(step, ids))
        harmless = step < self.num_trimmed or (step < self.num_committed and not wrong)
        assert answer == (None if harmless else "LedgerViolation")

    @rule(back=st.integers(-1, 3))
    def trim(self, back: int) -> None:
        step = max(0, self.num_committed - back)
        freed = self.both(lambda ledger: ledger.trim(step))
        if step > self.num_committed:
            assert freed == "LedgerViolation"
            return
        assert freed == max(0, step - self.num_trimmed) * self.config.batch_groups
        self.num_trimmed = max(self.num_trimmed, step)

    @precondition(lambda self: len(self.batches) > 9)
    @rule()
    def close(self) -> None:
        self.both(lambda ledger: ledger.close())
        self.closed = True

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "config"):
            return
        counts = self.both(lambda ledger: ledger.counts())
        assert counts.conserved
        assert min(dataclasses.asdict(counts)[name] for name in COUNTED) >= 0
        outstanding = counts.issued + counts.leased + counts.delivered
        assert outstanding <= self.config.max_outstanding_groups
        assert sum(counts.reasons.values()) == counts.filtered + counts.dropped + counts.abandoned
        assert counts.step == self.num_committed
        assert counts.consumed == self.num_committed * self.config.batch_groups
        assert counts.taken + counts.consumed == sum(map(len, self.batches))
        in_steps = [ticket for batch in self.batches for ticket in batch]
        assert len(in_steps) == len(set(in_steps))
        deadlines = self.runner.run(self.server.deadlines())
        assert deadlines == self.runner.run(self.reference.deadlines())
        assert feasible(deadlines, len(self.batches), self.config.batch_groups)

    def teardown(self) -> None:
        try:
            if hasattr(self, "config") and not self.closed:
                self.go_on()
        finally:
            self.runner.run(self.client.aclose())
            self.runner.close()

    def go_on(self) -> None:
        """From wherever the calls led, a lively fleet still fills the next step."""
        step = len(self.batches)
        self.run_out()
        for _ in range(2 * self.config.batch_groups + 1):
            if self.both(lambda ledger: ledger.take(step)).ticket_ids is not None:
                return
            self.one_fresh_group(step)
        raise AssertionError(f"step {step} cannot be filled")

    def one_fresh_group(self, version: int) -> None:
        first = self.both(lambda ledger: ledger.counts()).issued_total
        self.both(lambda ledger: ledger.issue(tickets(first, first + 3)))
        claimed = self.both(lambda ledger: ledger.claim("a", version))
        assert len(claimed.leases) == 1
        assert self.both(lambda ledger: ledger.deliver(claimed.leases[0], b"fresh"))


COUNTED = (
    "issued", "leased", "delivered", "taken", "consumed", "filtered", "dropped", "abandoned",
    "payload_bytes", "held_bytes",
)  # fmt: skip


async def outcome(call: Callable[[Ledger], Awaitable[Any]], ledger: Ledger) -> Any:
    """The answer, or the name of the error."""
    try:
        return await call(ledger)
    except HeadwayError as error:
        return type(error).__name__


def timeless(answer: Any) -> Any:
    """The answer without its durations, which no two stores share."""
    if not isinstance(answer, TakeResult):
        return answer
    assert set(answer.queue_s) == set(answer.ticket_ids or ())
    assert min(answer.queue_s.values(), default=0.0) >= 0
    waiting = tuple(dataclasses.replace(holder, held_s=0.0) for holder in answer.waiting_for)
    return dataclasses.replace(answer, queue_s={}, waiting_for=waiting)


@pytest.mark.parametrize("server", ["valkey", "redis"])
def test_scripts_match_the_reference(server: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(f"{server}_url")
    run_state_machine_as_test(
        lambda: LedgerMachine(url),
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def lively_fleet(machine: LedgerMachine, seed: int, on_late: Any) -> Counter[str]:
    """A run whose every eighth lease is a straggler; returns its last counts."""
    chance = random.Random(seed)
    machine.open(LedgerConfig(chance.randint(1, 3), chance.randint(1, 3), on_late, 3600.0, 2))
    waiting: list[Lease] = []
    for _ in range(120):
        known = len(machine.leases)
        machine.feed(4)
        machine.claim("a", chance.choice([0, 0, 1]), chance.randint(1, 3))
        waiting += machine.leases[known:]
        chance.shuffle(waiting)
        for lease in waiting[:]:
            if chance.random() < (0.03 if lease.token % 8 == 0 else 0.6):
                waiting.remove(lease)
                place = len(machine.leases) - 1 - machine.leases.index(lease)
                machine.deliver(place, 10, "dull" if lease.token % 11 == 0 else "")
        machine.take()
        if machine.num_committed < len(machine.batches):
            machine.commit()
        if chance.random() < 0.1:
            machine.trim(1)
        if chance.random() < 0.01:
            machine.run_out()
        machine.holds()
    counts = machine.both(lambda ledger: ledger.counts())
    machine.teardown()
    return Counter({k: v for k, v in dataclasses.asdict(counts).items() if isinstance(v, int)})


@pytest.mark.parametrize("on_late", ["wait", "mask", "drop"])
def test_scripts_match_the_reference_when_some_are_late(valkey_url: str, on_late: str) -> None:
    total: Counter[str] = Counter()
    for seed in range(3):
        total += lively_fleet(LedgerMachine(valkey_url), seed, on_late)
    assert total["consumed"] > 100
    assert total["filtered"] > 5
    assert {
        "wait": total["stalled_steps"] > 5 and not total["late"] and not total["dropped"],
        "mask": total["late"] > 5 and not total["dropped"],
        "drop": total["dropped"] > 5 and not total["late"],
    }[on_late]
