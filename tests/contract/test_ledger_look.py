"""What a look at the ledger shows, over every implementation."""

import pytest

from headway.errors import NotFound
from tests.support.ledgers import LAG_ONE, deliver_all, tickets, train


async def test_a_look_shows_who_holds_what_and_changes_nothing(stand):
    ledger = stand.ledger
    with pytest.raises(NotFound):
        await ledger.look()
    await ledger.open(LAG_ONE)
    await ledger.issue(tickets(0, 6))
    await deliver_all(ledger, await ledger.claim("a", 0, 2))
    assert await train(ledger, 0) == (0, 1)
    await ledger.claim("b", 0, 2)
    await deliver_all(ledger, await ledger.claim("c", 1))
    await ledger.claim("c", 1)
    view = await ledger.look()
    assert (view.step, view.batch_groups, view.max_policy_lag) == (1, 2, 1)
    assert (view.issued, view.arrived, view.closed) == (0, (4,), False)
    shown = [(v.ticket_id, v.node_id, v.start_version, v.attempt) for v in view.leases]
    assert shown == [(2, "b", 0, 1), (3, "b", 0, 1), (5, "c", 1, 1)]
    assert view.deadlines == {2: 1, 3: 1, 4: 2, 5: 2}
    assert all(v.held_s >= 0 and 0 < v.left_s <= LAG_ONE.lease_s for v in view.leases)
    await stand.run_out()
    overdue = await ledger.look()
    assert all(v.left_s < 0 for v in overdue.leases) and len(overdue.leases) == 3
    assert (await ledger.look()).issued == 0  # nobody has ended them
    assert (await ledger.counts()).issued == 3
    await ledger.close()
    assert (await ledger.look()).closed
