"""Nodes and a learner that call a ledger in any order, die between any two calls, and repeat,
delay and reorder what they say.

Each call is made on the in-memory reference and on a server. Both must answer alike, hold
the same state, and keep every invariant (`ledger_audit`) after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headway.errors import HeadwayError
from headway.ledger.api import ClaimResult, Counts, Lease, Ledger, LedgerConfig, TakeResult
from headway.redis_client import connect
from tests.support.ledger_audit import Audit
from tests.support.ledgers import MemoryStand, RedisStand, tickets

Call = Callable[[Ledger], Awaitable[Any]]
NODES = "abc"

CONFIGS = st.builds(
    LedgerConfig,
    batch_groups=st.integers(1, 3),
    max_policy_lag=st.integers(0, 3),
    on_late=st.sampled_from(["wait", "mask", "mask", "drop"]),
    lease_s=st.just(3600.0),
    max_attempts=st.integers(1, 3),
    max_outstanding_groups=st.sampled_from([0, 0, 3, 7]),
    max_outstanding_bytes=st.sampled_from([8, 40, 1 << 30]),
)

FATES = st.sampled_from(
    ["answered"] * 6
    + [
        "lost",  # the client died, or the network did, before the server had it
        "unanswered",  # the server did it, and nobody heard
        "twice",  # the client repeated what had been done
        "late",  # it arrives later, after others
    ]
)


class LedgerMachine(RuleBasedStateMachine):
    """One job's ledger, its nodes and its learner."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client = connect(url)
        self.reference = MemoryStand()
        self.server = RedisStand(self.client, f"machine-{uuid.uuid4().hex[:12]}")
        self.late: list[Call] = []  # under way
        self.leases: list[Lease] = []  # all that any client ever heard of, oldest first
        self.position = 0  # the learner's next step
        self.took: tuple[int, ...] | None = None  # what it took for it, as far as it knows
        self.saved = [0]  # steps of its checkpoints; 0 is the base model
        self.closed = False
        self.config: LedgerConfig | None = None

    # -- calls -----------------------------------------------------------------------

    def both(self, call: Call) -> Any:
        """Makes the call on both; checks answers, states and invariants."""

        async def called() -> Any:
            answers = [await outcome(call, s.ledger) for s in (self.reference, self.server)]
            assert timeless(answers[0]) == timeless(answers[1])
            await self.check()
            return answers[1]

        return self.runner.run(called())

    async def check(self) -> None:
        counts = [await s.ledger.counts() for s in (self.reference, self.server)]
        assert counts[0] == counts[1]
        states = [await s.snapshot() for s in (self.reference, self.server)]
        assert states[0] == states[1]
        self.audit.check(states[1], counts[1])

    def counts(self) -> Counts:
        """Both agree. Ends the leases whose time is up."""
        found = [self.runner.run(s.ledger.counts()) for s in (self.reference, self.server)]
        assert found[0] == found[1]
        return found[1]

    def sent(self, fate: str, call: Call) -> Any:
        """The answer as the client gets it; None when it hears nothing."""
        if fate == "late":
            self.late.append(call)
        if fate in ("late", "lost"):
            return None
        if fate == "twice":
            self.both(call)
        answer = self.both(call)
        return None if fate == "unanswered" else answer

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 9))
    def a_late_call_arrives(self, which: int) -> None:
        self.both(self.late.pop(which % len(self.late)))

    @initialize(config=CONFIGS, steps=st.integers(0, 4), stragglers=st.integers(0, 3))
    def begin(self, config: LedgerConfig, steps: int, stragglers: int) -> None:
        """A job on its way, some of whose tickets take their time."""
        self.open(config)
        self.train(steps)
        self.straggle(stragglers)
        self.train(steps)

    def open(self, config: LedgerConfig) -> None:
        self.config = config.checked()
        self.audit = Audit(self.config)
        self.both(lambda ledger: ledger.open(config))
        self.both(lambda ledger: ledger.issue(tickets(0, 5)))

    # -- the feeder ------------------------------------------------------------------

    @rule(num=st.integers(1, 9), back=st.integers(-1, 2), fate=FATES)
    def issue(self, num: int, back: int, fate: str) -> None:
        first = max(0, self.counts().issued_total - back)
        self.sent(fate, lambda ledger: ledger.issue(tickets(first, first + num)))

    # -- nodes -----------------------------------------------------------------------

    @rule(node=st.sampled_from(NODES), age=st.integers(-1, 4), limit=st.integers(1, 4), fate=FATES)
    def claim(self, node: str, age: int, limit: int, fate: str) -> None:
        version = len(self.audit.batches) - age
        call: Call = lambda ledger: ledger.claim(node, version, limit)  # noqa: E731
        if fate == "twice":  # the first answer is lost, and the leases with it
            self.both(call)
            fate = "answered"
        before = self.counts()
        claimed = self.sent(fate, call)
        if claimed == "LedgerViolation":
            assert version < 0 or version > len(self.audit.batches)
        elif claimed is not None:
            self.granted(claimed, before)

    def granted(self, claimed: ClaimResult, before: Counts) -> None:
        """A refusal has its reason; a grant beyond the bound of bytes is for one batch only."""
        assert self.config is not None
        assert bool(claimed.leases) == (claimed.refusal is None)
        self.leases += claimed.leases
        full = before.payload_bytes >= self.config.max_outstanding_bytes
        after = self.counts()
        if claimed.refusal in ("bytes", "lag"):
            assert claimed.refusal == "lag" or full
            assert before.leased + before.delivered >= self.config.batch_groups
        if claimed.leases and full:
            assert after.leased + after.delivered <= self.config.batch_groups

    @rule(limit=st.integers(1, 6), kept=st.integers(0, 2))
    def work(self, limit: int, kept: int) -> None:
        """A lively node claims at the newest version and delivers all but the first `kept`."""
        for lease in self.start(limit)[kept:]:
            assert (
                self.both(lambda ledger, x=lease: ledger.deliver(x, b"delivered.")) or self.closed
            )

    @rule(num=st.integers(1, 3))
    def straggle(self, num: int) -> None:
        """Tickets start whose end is far."""
        if num:
            self.start(num)

    def start(self, num: int) -> tuple[Lease, ...]:
        assert self.config is not None
        version = len(self.audit.batches)
        self.issue(self.config.batch_groups, 0, "answered")
        claimed = self.both(lambda ledger: ledger.claim("c", version, num))
        self.leases += claimed.leases
        leases: tuple[Lease, ...] = claimed.leases
        return leases

    @precondition(lambda self: self.leases)
    @rule(
        back=st.integers(0, 6),
        size=st.integers(0, 30),
        reason=st.sampled_from(["", "", "", "dull"]),
        fate=FATES,
    )
    def deliver(self, back: int, size: int, reason: str, fate: str) -> None:
        """By whoever once had a lease, the dead and the slow included."""
        lease = self.leases[max(0, len(self.leases) - 1 - back)]
        payload = bytes([lease.token % 256]) * size
        self.sent(fate, lambda ledger: ledger.deliver(lease, payload, reason))

    @precondition(lambda self: self.leases)
    @rule(back=st.integers(0, 6), how=st.sampled_from(["fail", "release"]), fate=FATES)
    def hand_back(self, back: int, how: str, fate: str) -> None:
        lease = self.leases[max(0, len(self.leases) - 1 - back)]
        if how == "fail":
            self.sent(fate, lambda ledger: ledger.fail(lease, "broken"))
        else:
            self.sent(fate, lambda ledger: ledger.release(lease))

    @rule(num=st.integers(0, 6), fate=FATES)
    def renew(self, num: int, fate: str) -> None:
        some = tuple(self.leases[-num:]) if num else ()
        self.sent(fate, lambda ledger: ledger.renew("a", some))

    @precondition(lambda self: self.leases)
    @rule(back=st.integers(0, 6), how=st.sampled_from(["deliver", "fail", "release", "renew"]))
    def overtaken(self, back: int, how: str) -> None:
        """A node sleeps for longer than its lease, another takes over, the first one wakes."""
        lease = self.leases[max(0, len(self.leases) - 1 - back)]
        self.leases_end(None)
        claimed = self.both(lambda ledger: ledger.claim("b", len(self.audit.batches), 4))
        self.leases += claimed.leases
        if how == "deliver":
            assert self.both(lambda ledger: ledger.deliver(lease, b"too late")) is False
        elif how == "renew":
            assert self.both(lambda ledger: ledger.renew("a", [lease])) == ()
        elif how == "fail":
            assert self.both(lambda ledger: ledger.fail(lease, "too late")) is False
        else:
            assert self.both(lambda ledger: ledger.release(lease)) is False

    @rule(node=st.sampled_from([*NODES, None]))
    def leases_end(self, node: str | None) -> None:
        for stand in (self.reference, self.server):
            self.runner.run(stand.run_out(node))
        self.runner.run(self.check())

    # -- the learner -----------------------------------------------------------------

    @rule(fate=FATES)
    def take(self, fate: str) -> None:
        step = self.position
        taken = self.sent(fate, lambda ledger: ledger.take(step))
        if isinstance(taken, TakeResult) and taken.ticket_ids is not None:
            assert (taken.ticket_ids, taken.late) == self.audit.batches[step]
            self.took = taken.ticket_ids
            payloads = self.both(lambda ledger: ledger.payloads(taken.ticket_ids or ()))
            assert len(payloads) == len(taken.ticket_ids)
        else:
            assert taken is None or isinstance(taken, TakeResult), taken

    @precondition(lambda self: self.took is not None)
    @rule(fate=FATES)
    def commit(self, fate: str) -> None:
        step, ids = self.position, self.took or ()
        call: Call = lambda ledger: ledger.commit(step, ids)  # noqa: E731
        if fate in ("answered", "twice"):
            assert self.sent(fate, call) is None
            self.position, self.took = step + 1, None
        else:
            self.sent(fate, call)  # it heard nothing: it says it again, unless it dies

    @precondition(lambda self: self.took is None and self.position > self.saved[-1])
    @rule(fate=FATES)
    def save(self, fate: str) -> None:
        """A checkpoint is durable; groups are kept back to the oldest of two."""
        self.saved = [*self.saved, self.position][-2:]
        oldest = self.saved[0]
        self.sent(fate, lambda ledger: ledger.trim(oldest))

    @rule(checkpoint=st.sampled_from([-1, 0]))
    def learner_dies(self, checkpoint: int) -> None:
        """The next one starts from the newest checkpoint, or the one before if it is damaged."""
        self.position, self.took = self.saved[checkpoint], None
        if checkpoint == 0:
            del self.saved[1:]

    @rule(num=st.integers(1, 4))
    def train(self, num: int) -> None:
        """Some steps of a fleet and a learner to which nothing happens."""
        assert self.config is not None
        for _ in range(0 if self.closed else 2 * num):
            if self.position == len(self.audit.batches):
                self.work(self.config.batch_groups, 0)
            self.take("answered")
            if self.took is not None:
                self.commit("answered")

    @rule(what=st.sampled_from(["open", "take", "commit", "trim"]), back=st.integers(-2, 4))
    def confused_call(self, what: str, back: int) -> None:
        """Of some other step, of other groups, with other settings: harmless or refused."""
        committed, taken = self.counts().step, len(self.audit.batches)
        if what == "open":
            self.open_again(other=back < 1)
        elif what == "take":
            self.take_any_step(max(0, taken - back))
        elif what == "commit":
            self.commit_any_step(max(0, committed - back), committed, wrong=back % 2 == 0)
        else:
            ahead = committed + abs(back) + 1
            assert self.both(lambda ledger: ledger.trim(ahead)) == "LedgerViolation"
        assert (self.counts().step, len(self.audit.batches) - taken) in {
            (committed, 0),
            (committed, int(what == "take")),
        }

    def open_again(self, other: bool) -> None:
        assert self.config is not None
        same = dataclasses.replace(self.config, lease_s=self.config.lease_s + other)
        assert self.both(lambda ledger: ledger.open(same)) == ("Conflict" if other else None)

    def take_any_step(self, step: int) -> None:
        taken = len(self.audit.batches)
        answer = self.both(lambda ledger: ledger.take(step))
        if step > taken:
            assert answer == "LedgerViolation"
        elif step < taken and answer != "NotFound":
            assert answer.replayed and answer.ticket_ids == self.audit.batches[step][0]

    def commit_any_step(self, step: int, committed: int, wrong: bool) -> None:
        if step == committed and not wrong:
            return
        batches = self.audit.batches
        ids = batches[step][0] if step < len(batches) and not wrong else (0, 0)
        answer = self.both(lambda ledger: ledger.commit(step, ids))
        assert answer in (None, "LedgerViolation")

    @precondition(lambda self: len(self.audit.batches) > 9)
    @rule()
    def close(self) -> None:
        self.start(1)
        self.both(lambda ledger: ledger.close())
        self.closed = True
        for lease in self.leases[-2:]:
            assert not self.both(lambda ledger, x=lease: ledger.deliver(x, b"after the end"))
        refused = self.both(lambda ledger: ledger.claim("a", len(self.audit.batches)))
        assert refused == ClaimResult((), "closed")

    # -- the end ---------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if self.config is not None and not self.closed:
                self.go_on()
        finally:
            self.runner.run(self.client.aclose())
            self.runner.close()

    def go_on(self) -> None:
        """From wherever the calls led, a lively fleet still fills the next step."""
        assert self.config is not None
        step = len(self.audit.batches)
        self.leases_end(None)
        for _ in range(2 * self.config.batch_groups + 1):
            if self.both(lambda ledger: ledger.take(step)).ticket_ids is not None:
                return
            self.one_fresh_group(step)
        raise AssertionError(f"step {step} cannot be filled")

    def one_fresh_group(self, version: int) -> None:
        first = self.counts().issued_total
        self.both(lambda ledger: ledger.issue(tickets(first, first + 3)))
        claimed = self.both(lambda ledger: ledger.claim("a", version))
        assert len(claimed.leases) == 1
        assert self.both(lambda ledger: ledger.deliver(claimed.leases[0], b"fresh"))


async def outcome(call: Call, ledger: Ledger) -> Any:
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
