"""Steps of the ledger, over every implementation: take, commit, trim, stragglers; by hand."""

from __future__ import annotations

import pytest

from headway.errors import LedgerViolation, NotFound
from headway.ledger.api import Counts, Ledger, LedgerConfig
from tests.support.ledgers import (
    LAG_ONE,
    deliver_all,
    tickets,
    train,
)

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
    assert (await stand.snapshot()).deadlines == {}


async def test_on_late_mask_trains_it_later_and_says_so(stand):
    ledger = stand.ledger
    straggler, _ = await stall(ledger, "mask")
    assert await train(ledger, 1) == (2,)
    assert (await stand.snapshot()).deadlines == {}
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
    assert (await stand.snapshot()).deadlines == {0: 3}
    await ledger.deliver(lease, b"0")
    taken = await ledger.take(2)
    assert (taken.ticket_ids, taken.late) == ((0,), frozenset())
