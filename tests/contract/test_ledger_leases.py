"""Leases and deliveries of the ledger, over every implementation, worked out by hand."""

from __future__ import annotations

import pytest

from headway.errors import NotFound
from headway.ledger.api import ClaimResult, LedgerConfig
from headway.payloads import unpack_group
from tests.support.ledgers import (
    LAG_ONE,
    ON_POLICY,
    deliver_all,
    ids,
    payload_of,
    ticket,
    tickets,
    train,
)


async def test_an_expired_ticket_is_claimable_again_without_a_deadline(stand):
    ledger = stand.ledger
    await ledger.open(LedgerConfig(1, 1))  # room for 2 started
    await ledger.issue(tickets(0, 3))
    old = (await ledger.claim("a", 0, 2)).leases
    assert await ledger.claim("b", 0) == ClaimResult((), "lag")
    await stand.run_out()
    again = (await ledger.claim("b", 0, 2)).leases
    assert ids(again) == [0, 1]
    assert [lease.attempt for lease in again] == [2, 2]
    assert all(new.token > was.token for new, was in zip(again, old, strict=True))
    counts = await ledger.counts()
    assert (counts.expired_leases, counts.leased, counts.issued) == (2, 2, 1)
    assert (await stand.snapshot()).deadlines == {0: 1, 1: 1}


async def test_renew_keeps_what_is_held_and_names_what_is_lost(stand):
    ledger = stand.ledger
    await ledger.open(LAG_ONE)
    await ledger.issue(tickets(0, 3))
    lost = (await ledger.claim("a", 0)).leases
    await stand.run_out()
    kept = (await ledger.claim("b", 0, 2)).leases
    assert ids(kept) == [0, 1]
    assert await ledger.renew("b", (*lost, *kept)) == kept
    assert await ledger.renew("b", ()) == ()
    await stand.run_out()
    assert await ledger.renew("b", kept) == ()
    assert (await ledger.counts()).issued == 3


async def test_release_hands_back_at_once_and_counts_no_attempt(ledger):
    await ledger.open(LedgerConfig(1, 0, max_attempts=1))
    await ledger.issue(tickets(0, 1))
    lease = (await ledger.claim("a", 0)).leases[0]
    assert await ledger.release(lease)
    assert not await ledger.release(lease)
    again = (await ledger.claim("b", 0)).leases[0]
    assert (again.ticket, again.attempt) == (ticket(0), 1)
    assert not await ledger.deliver(lease, b"of the old lease")


async def test_used_up_attempts_abandon_a_ticket(stand):
    ledger = stand.ledger
    await ledger.open(LedgerConfig(1, 2, max_attempts=2))
    await ledger.issue(tickets(0, 2))
    lease = (await ledger.claim("a", 0)).leases[0]
    assert await ledger.fail(lease, "prompt_too_long")
    assert not await ledger.fail(lease, "prompt_too_long")
    lease = (await ledger.claim("a", 0)).leases[0]
    assert (lease.ticket.ticket_id, lease.attempt) == (0, 2)
    assert await ledger.fail(lease, "prompt_too_long")
    for _ in range(2):
        assert ids(await ledger.claim("a", 0)) == [1]
        await stand.run_out()
    counts = await ledger.counts()
    assert counts.abandoned == 2
    assert counts.reasons == {"prompt_too_long": 1, "lease_expired": 1}
    assert (counts.failed_attempts, counts.expired_leases, counts.conserved) == (2, 2, True)
    assert (await stand.snapshot()).deadlines == {}
    assert await ledger.claim("a", 0) == ClaimResult((), "empty")


async def test_a_group_arrives_once_and_unchanged(ledger):
    await ledger.open(ON_POLICY)
    await ledger.issue(tickets(0, 2))
    claimed = await ledger.claim("a", 0, 2)
    binary = bytes(range(256)) * 3
    assert await ledger.deliver(claimed.leases[0], binary)
    assert not await ledger.deliver(claimed.leases[0], b"again")
    await ledger.deliver(claimed.leases[1], payload_of(claimed.leases[1]))
    first, second = await ledger.payloads([0, 1])
    assert first == binary
    assert unpack_group(second).ticket == ticket(1)
    counts = await ledger.counts()
    assert (counts.delivered, counts.refused_deliveries) == (2, 1)


async def test_filtered_groups_are_counted_and_replaced(stand):
    ledger = stand.ledger
    await ledger.open(LedgerConfig(2, 0, max_outstanding_groups=2))
    await ledger.issue(tickets(0, 2))
    one, two = (await ledger.claim("a", 0, 2)).leases
    assert await ledger.deliver(one, payload_of(one), filter_reason="zero_variance")
    assert await ledger.deliver(two, payload_of(two))
    assert (await ledger.take(0)).num_ready == 1
    with pytest.raises(NotFound, match="ticket 0"):
        await ledger.payloads([0])
    assert await ledger.issue(tickets(2, 4)) == 1
    await deliver_all(ledger, await ledger.claim("a", 0))
    assert await train(ledger, 0) == (1, 2)
    counts = await ledger.counts()
    assert counts.reasons == {"zero_variance": 1}
    assert (counts.filtered, counts.consumed, counts.conserved) == (1, 2, True)
