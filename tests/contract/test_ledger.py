"""Opening a ledger, issue, claim and members, over every implementation, worked out by hand."""

from __future__ import annotations

import pytest

from headway.errors import Conflict, InvalidSpec, LedgerViolation, NotFound
from headway.ledger.api import ClaimResult, Ledger, LedgerConfig, Member
from tests.support.ledgers import (
    LAG_ONE,
    ON_POLICY,
    Stand,
    deliver_all,
    ids,
    ticket,
    tickets,
    train,
)

# ---- open ----


async def test_nothing_works_before_open(ledger):
    for call in (
        ledger.issue(tickets(0, 1)),
        ledger.claim("a", 0),
        ledger.take(0),
        ledger.counts(),
        ledger.close(),
    ):
        with pytest.raises(NotFound, match="never opened"):
            await call


async def test_open_again_finds_the_same_ledger(stand):
    await stand.ledger.open(LAG_ONE)
    await stand.ledger.issue(tickets(0, 3))
    again = stand.another_process()
    await again.open(LAG_ONE)
    assert (await again.counts()).issued == 3


async def test_open_with_other_settings_is_a_conflict(ledger):
    await ledger.open(LAG_ONE)
    with pytest.raises(Conflict, match="other settings"):
        await ledger.open(ON_POLICY)


@pytest.mark.parametrize(
    "config, complaint",
    [
        (LedgerConfig(0, 1), "batch_groups"),
        (LedgerConfig(1, -1), "max_policy_lag"),
        (LedgerConfig(1, 1, lease_s=0), "lease_s"),
        (LedgerConfig(1, 1, max_attempts=0), "max_attempts"),
        (LedgerConfig(4, 1, max_outstanding_groups=3), "max_outstanding_groups 3 is below"),
        (LedgerConfig(1, 1, on_late="skip"), "on_late is 'skip'"),
    ],
)
async def test_settings_that_cannot_work_are_refused(ledger, config, complaint):
    with pytest.raises(InvalidSpec, match=complaint):
        await ledger.open(config)


# ---- issue ----


async def test_issue_is_bounded_and_repeatable(ledger):
    await ledger.open(LAG_ONE)  # bound: 2 * (1 + 2) = 6 groups
    assert await ledger.issue(tickets(0, 4)) == 4
    assert await ledger.issue(tickets(0, 4)) == 4  # issued before: accepted, not issued again
    assert await ledger.issue(tickets(2, 9)) == 4  # 2, 3 known; 4, 5 fit; 6 does not
    counts = await ledger.counts()
    assert (counts.issued_total, counts.issued) == (6, 6)
    assert await ledger.issue(tickets(6, 7)) == 0
    await deliver_all(ledger, await ledger.claim("a", 0, 2))
    assert await ledger.issue(tickets(6, 7)) == 0  # delivered still counts as outstanding
    await train(ledger, 0)
    assert await ledger.issue(tickets(6, 9)) == 2  # two places are free again


async def test_issue_refuses_gaps(ledger):
    await ledger.open(LAG_ONE)
    with pytest.raises(LedgerViolation, match="gap"):
        await ledger.issue(tickets(1, 2))
    with pytest.raises(LedgerViolation, match="consecutive"):
        await ledger.issue([ticket(0), ticket(2)])
    assert await ledger.issue([]) == 0
    assert (await ledger.counts()).issued_total == 0


# ---- claim ----


async def test_claim_gives_the_oldest_tickets_whole(ledger):
    await ledger.open(LAG_ONE)
    await ledger.issue(tickets(0, 4))
    first = await ledger.claim("a", 0)
    assert [lease.ticket for lease in first.leases] == [ticket(0)]
    assert (first.leases[0].attempt, first.leases[0].start_version) == (1, 0)
    second = await ledger.claim("b", 0, 9)
    assert ids(second) == [1, 2, 3]  # (F): 4 in all
    assert len({lease.token for lease in (*first.leases, *second.leases)}) == 4


async def test_claim_keeps_the_lag_rule(ledger):
    await ledger.open(LAG_ONE)
    await ledger.issue(tickets(0, 6))
    assert ids(await ledger.claim("a", 0, 9)) == [0, 1, 2, 3]  # 2 * (1 - 0 + 1)
    assert await ledger.claim("a", 0) == ClaimResult((), "lag")


async def test_claim_refuses_old_and_impossible_versions(ledger):
    await ledger.open(ON_POLICY)
    await ledger.issue(tickets(0, 4))
    await deliver_all(ledger, await ledger.claim("a", 0, 2))
    await train(ledger, 0)
    assert await ledger.claim("a", 0) == ClaimResult((), "stale_version")
    for version in (2, -1):
        with pytest.raises(LedgerViolation, match="no step has made"):
            await ledger.claim("a", version)
    with pytest.raises(InvalidSpec, match="limit"):
        await ledger.claim("a", 1, 0)
    assert ids(await ledger.claim("a", 1, 9)) == [2, 3]


async def test_claim_on_an_empty_and_on_a_closed_ledger(ledger):
    await ledger.open(LAG_ONE)
    assert await ledger.claim("a", 0) == ClaimResult((), "empty")
    await ledger.issue(tickets(0, 2))
    held = (await ledger.claim("a", 0)).leases[0]
    await ledger.close()
    assert await ledger.claim("a", 0) == ClaimResult((), "closed")
    assert await ledger.issue(tickets(2, 3)) == 0
    assert not await ledger.deliver(held, b"too late")
    counts = await ledger.counts()
    assert (counts.leased, counts.refused_deliveries, counts.conserved) == (1, 1, True)


async def test_bytes_stop_claims_but_never_a_batch(ledger):
    await ledger.open(LedgerConfig(2, 3, max_outstanding_bytes=100))
    await ledger.issue(tickets(0, 6))
    first = (await ledger.claim("a", 0)).leases[0]
    await ledger.deliver(first, b"x" * 150)
    # Over the bound with one of two groups: one more may start, not two.
    second = await ledger.claim("a", 0, 5)
    assert ids(second) == [1]
    assert await ledger.claim("a", 0) == ClaimResult((), "bytes")
    await ledger.deliver(second.leases[0], b"y")
    assert (await ledger.counts()).payload_bytes == 151
    await train(ledger, 0)
    counts = await ledger.counts()
    assert (counts.payload_bytes, counts.held_bytes) == (0, 151)
    assert ids(await ledger.claim("a", 0, 9)) == [2, 3, 4, 5]


# ---- members ----


async def test_members_come_and_go(stand):
    ledger = stand.ledger
    a = Member("a", "127.0.0.1:1", "broadcast", 3)
    b = Member("b", "127.0.0.1:2", "none")
    await ledger.announce(b, 60)  # before the learner has opened the ledger
    await ledger.announce(a, 60)
    assert await stand.another_process().members() == (a, b)
    newer = Member("a", "127.0.0.1:9", "broadcast", 4, ("gloo", "nccl"), "5e551")
    await ledger.announce(newer, 60)
    await ledger.withdraw("b")
    await ledger.withdraw("unknown")
    assert await ledger.members() == (newer,)
    await stand.run_out()
    assert await ledger.members() == ()


def test_every_stand_is_a_ledger(stand: Stand):
    ledger: Ledger = stand.ledger
    assert all(callable(getattr(ledger, name)) for name in vars(Ledger) if not name.startswith("_"))
