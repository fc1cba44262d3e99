"""Every transition of the ledger, over every implementation, worked out by hand."""

from __future__ import annotations

import pytest

from headway.codec import unpack_group
from headway.errors import Conflict, InvalidSpec, LedgerViolation, NotFound
from headway.ledger.api import ClaimResult, Counts, Ledger, LedgerConfig, Member
from tests.support.ledgers import Stand, ids, payload_of, ticket, tickets

ON_POLICY = LedgerConfig(batch_groups=2, max_policy_lag=0)
LAG_ONE = LedgerConfig(batch_groups=2, max_policy_lag=1)


async def deliver_all(ledger: Ledger, claimed: ClaimResult) -> None:
    for lease in claimed.leases:
        assert await ledger.deliver(lease, payload_of(lease))


async def train(ledger: Ledger, step: int) -> tuple[int, ...]:
    taken = await ledger.take(step)
    assert taken.ticket_ids is not None
    await ledger.commit(step, taken.ticket_ids)
    return taken.ticket_ids


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


# ---- leases ----


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
    assert await stand.deadlines() == {0: 1, 1: 1}


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
    assert await stand.deadlines() == {}
    assert await ledger.claim("a", 0) == ClaimResult((), "empty")


# ---- deliver ----


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


# ---- take, commit, trim ----


async def test_a_whole_step(ledger):
    await ledger.open(LAG_ONE)
    await ledger.issue(tickets(0, 6))
    a, b, c, d = (await ledger.claim("a", 0, 4)).leases
    for lease in (d, b):
        await ledger.deliver(lease, b"p%d" % lease.ticket.ticket_id)
    # need(1) = 4 - 2 = 2: any two; the first two to arrive, ids ascending.
    taken = await ledger.take(0)
    assert (taken.ticket_ids, taken.replayed, taken.late) == ((1, 3), False, frozenset())
    assert set(taken.queue_s) == {1, 3} and min(taken.queue_s.values()) >= 0
    assert await ledger.payloads(taken.ticket_ids) == [b"p1", b"p3"]
    assert (await ledger.counts()).taken == 2
    await ledger.commit(0, taken.ticket_ids)
    await ledger.commit(0, taken.ticket_ids)  # harmless
    # Step 1 waits for the two that are due, whatever else arrives.
    e, f = (await ledger.claim("b", 1, 9)).leases
    for lease in (e, f, c):
        await ledger.deliver(lease, b"p%d" % lease.ticket.ticket_id)
    waiting = await ledger.take(1)
    assert (waiting.ticket_ids, waiting.num_ready) == (None, 3)
    holder = waiting.waiting_for[0]
    assert (holder.ticket_id, holder.node_id, holder.start_version) == (0, "a", 0)
    assert len(waiting.waiting_for) == 1 and holder.held_s >= 0
    await ledger.take(1)
    await ledger.deliver(a, b"p0")
    assert await train(ledger, 1) == (0, 2)
    assert await train(ledger, 2) == (4, 5)
    assert await ledger.counts() == Counts(
        issued_total=6,
        issued=0,
        leased=0,
        delivered=0,
        taken=0,
        consumed=6,
        filtered=0,
        dropped=0,
        abandoned=0,
        refused_deliveries=0,
        expired_leases=0,
        step=3,
        payload_bytes=0,
        held_bytes=12,
        stalled_steps=1,
    )


async def test_take_waits_for_nobody_in_particular_while_groups_are_few(ledger):
    await ledger.open(LAG_ONE)
    await ledger.issue(tickets(0, 3))
    await deliver_all(ledger, await ledger.claim("a", 0))
    await ledger.claim("a", 0)
    taken = await ledger.take(0)
    assert (taken.ticket_ids, taken.num_ready, taken.waiting_for) == (None, 1, ())


async def test_steps_go_in_order(ledger):
    await ledger.open(LedgerConfig(1, 2))
    await ledger.issue(tickets(0, 3))
    await deliver_all(ledger, await ledger.claim("a", 0, 3))
    with pytest.raises(LedgerViolation, match="out of order"):
        await ledger.take(1)
    with pytest.raises(LedgerViolation, match="never taken"):
        await ledger.commit(0, [0])
    await ledger.take(0)
    await ledger.take(1)
    with pytest.raises(LedgerViolation, match="out of order"):
        await ledger.commit(1, [1])
    with pytest.raises(LedgerViolation, match="took the tickets"):
        await ledger.commit(0, [1])
    with pytest.raises(LedgerViolation, match="cannot trim"):
        await ledger.trim(1)
    await ledger.commit(0, [0])
    with pytest.raises(LedgerViolation, match="took the tickets"):
        await ledger.commit(0, [0, 1])
    assert (await ledger.counts()).step == 1


async def test_a_crashed_learner_gets_the_same_groups_until_they_are_trimmed(stand):
    await stand.ledger.open(LedgerConfig(2, 2))
    await stand.ledger.issue(tickets(0, 8))
    await deliver_all(stand.ledger, await stand.ledger.claim("a", 0, 6))
    batches = [await train(stand.ledger, step) for step in range(2)]
    batches.append((await stand.ledger.take(2)).ticket_ids)  # dies before the commit
    again = stand.another_process()
    for step, batch in enumerate(batches):
        replay = await again.take(step)
        assert (replay.ticket_ids, replay.replayed) == (batch, True)
        assert len(replay.queue_s) == 2
        assert len(await again.payloads(batch)) == 2
        await again.commit(step, batch)
    assert (await again.counts()).consumed == 6
    assert await again.trim(2) == 4
    assert await again.trim(2) == 0
    with pytest.raises(NotFound, match="trimmed"):
        await again.take(1)
    with pytest.raises(NotFound, match="ticket 0"):
        await again.payloads([4, 0])
    await again.commit(1, batches[1])
    assert (await again.take(2)).ticket_ids == batches[2]


# ---- stragglers ----


async def stall(ledger: Ledger, on_late: str) -> tuple:
    """B = 1, eta = 1: ticket 0 is due at step 1 and unarrived; ticket 2 has arrived."""
    await ledger.open(LedgerConfig(1, 1, on_late=on_late, max_outstanding_groups=9))
    await ledger.issue(tickets(0, 6))
    straggler, quick = (await ledger.claim("slow", 0, 2)).leases
    await ledger.deliver(quick, b"1")
    assert await train(ledger, 0) == (1,)
    assert (await ledger.take(1)).ticket_ids is None  # nothing could be filled without it
    assert (await ledger.counts()).dropped == 0
    other = (await ledger.claim("quick", 1)).leases[0]
    await ledger.deliver(other, b"2")
    return straggler, other


async def test_on_late_wait_stalls_and_says_for_whom(ledger):
    straggler, _ = await stall(ledger, "wait")
    for _ in range(2):
        taken = await ledger.take(1)
        assert [h.node_id for h in taken.waiting_for] == ["slow"]
    assert (await ledger.counts()).stalled_steps == 1
    await ledger.deliver(straggler, b"0")
    assert await train(ledger, 1) == (0,)
    assert await train(ledger, 2) == (2,)


async def test_on_late_drop_goes_on_without(stand):
    ledger = stand.ledger
    straggler, _ = await stall(ledger, "drop")
    assert await train(ledger, 1) == (2,)
    assert not await ledger.deliver(straggler, b"0")
    assert await ledger.renew("slow", [straggler]) == ()
    counts = await ledger.counts()
    assert (counts.dropped, counts.reasons, counts.refused_deliveries) == (1, {"late": 1}, 1)
    assert counts.conserved
    assert await stand.deadlines() == {}


async def test_on_late_mask_trains_it_later_and_says_so(stand):
    ledger = stand.ledger
    straggler, _ = await stall(ledger, "mask")
    assert await train(ledger, 1) == (2,)
    assert await stand.deadlines() == {}
    assert await ledger.renew("slow", [straggler]) == (straggler,)
    assert await ledger.deliver(straggler, b"0")
    taken = await ledger.take(2)
    assert (taken.ticket_ids, taken.late) == ((0,), frozenset({0}))
    assert (await ledger.take(2)).late == frozenset({0})
    assert (await ledger.counts()).late == 1


async def test_a_late_ticket_that_is_lost_starts_afresh(stand):
    ledger = stand.ledger
    await stall(ledger, "mask")
    assert await train(ledger, 1) == (2,)
    await stand.run_out()
    lease = (await ledger.claim("b", 2)).leases[0]
    assert (lease.ticket.ticket_id, lease.attempt) == (0, 2)
    assert await stand.deadlines() == {0: 3}
    await ledger.deliver(lease, b"0")
    taken = await ledger.take(2)
    assert (taken.ticket_ids, taken.late) == ((0,), frozenset())


# ---- members ----


async def test_members_come_and_go(stand):
    ledger = stand.ledger
    a = Member("a", "127.0.0.1:1", "broadcast", 3)
    b = Member("b", "127.0.0.1:2", "none")
    await ledger.announce(b, 60)  # before the learner has opened the ledger
    await ledger.announce(a, 60)
    assert await stand.another_process().members() == (a, b)
    newer = Member("a", "127.0.0.1:9", "broadcast", 4)
    await ledger.announce(newer, 60)
    await ledger.withdraw("b")
    await ledger.withdraw("unknown")
    assert await ledger.members() == (newer,)
    await stand.run_out()
    assert await ledger.members() == ()


def test_every_stand_is_a_ledger(stand: Stand):
    ledger: Ledger = stand.ledger
    assert all(callable(getattr(ledger, name)) for name in vars(Ledger) if not name.startswith("_"))
