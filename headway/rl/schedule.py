"""The lag rule: which tickets may start, and which groups make a step's batch.

Version s is the policy after s optimiser steps; step s trains with version s. A
ticket started at version u has the deadline u + max_policy_lag, the last step
that may train on its oldest token. With s the next step to take and B groups a
step, the started and not yet taken tickets are a *feasible schedule* when

    for every d >= s:   N(d) := #(deadline <= d)  <=  B * (d - s + 1)             (F)

A step takes exactly B groups. It leaves (F) true for step s + 1 exactly when, of
its groups, T(d) have a deadline <= d with

    for every d >= s:   T(d)  >=  need(d) := N(d) - B * (d - s)

d = s says that every group whose deadline is s is in the batch.

**Never a breach.** A claim is granted only if (F) holds with it; losing a lease or
filtering a group only lowers N; a step leaves (F) true for the next. (F) at d = s
says N(s) <= B, so the groups due at s fit into step s, which takes them all.

**Never a deadlock.** need(d) <= B by (F). If B groups have arrived and, for each
d, need(d) of them have deadlines <= d, the batch is complete (see `fill`).
Otherwise, either fewer than B tickets are started: then N(d) + 1 <= B for every d,
and a node of any version u >= s - max_policy_lag may claim; or some started ticket
has not arrived: it does, or its lease expires and it counts no longer. With
max_policy_lag = 0 all started tickets have the deadline s, so exactly B start at
version s and step s trains on exactly those: a synchronous trainer.

**Worked example.** B = 2, max_policy_lag = 1, s = 0, all nodes at version 0. Four
tickets 0..3 start, deadline 1: N(1) = 4 <= 2 * 2; a fifth may not. need(1) = 4 - 2
= 2: step 0 takes any two, say 1 and 3, which came first. s = 1: tickets 0 and 2 are
due, N(1) = 2; version 1 is out, and two more tickets, 4 and 5, start with deadline 2:
N(2) = 4 <= 4. They are short and arrive first, but step 1 needs need(1) = 2 groups
due: it waits for 0 and 2, and 4 and 5 stay in the queue for step 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Deadlines = Mapping[int, int] | Sequence[int]
"""Deadlines of the started and not yet taken tickets, by ticket id or plain."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A step's batch, ids ascending, or None and the unarrived tickets that hold it up."""

    ticket_ids: tuple[int, ...] | None
    waiting_for: tuple[int, ...] = ()


def feasible(deadlines: Deadlines, step: int, batch_groups: int) -> bool:
    """Whether (F) holds: all can be trained in time, B a step, from `step` on."""
    started = 0
    for deadline, count in _tally(deadlines):
        started += count
        if deadline < step or started > batch_groups * (deadline - step + 1):
            return False
    return True


def room(
    deadlines: Deadlines, step: int, version: int, max_policy_lag: int, batch_groups: int
) -> int:
    """How many tickets may start at `version` so that (F) stays true; never negative.

    The smallest B * (d - s + 1) - N(d) over d >= version + max_policy_lag; only
    d at which N grows matter.
    """
    deadline = version + max_policy_lag
    if deadline < step:
        return 0
    started = sum(count for d, count in _tally(deadlines) if d <= deadline)
    free = batch_groups * (deadline - step + 1) - started
    for later, count in _tally(deadlines):
        if later > deadline:
            started += count
            free = min(free, batch_groups * (later - step + 1) - started)
    return max(0, free)


def may_claim(
    deadlines: Deadlines, step: int, version: int, max_policy_lag: int, batch_groups: int
) -> bool:
    """Whether one more ticket may start at `version`."""
    return room(deadlines, step, version, max_policy_lag, batch_groups) > 0


def fill(
    step: int, deadlines: Mapping[int, int], arrived: Sequence[int], batch_groups: int
) -> Fill:
    """The batch of `step`: who is needed, the rest in order of arrival.

    `deadlines` are those of all started tickets; `arrived` are the delivered
    ones in order of arrival. An arrived id without a deadline has none: it fills
    a place but is never needed (a late group, to be masked).

    In order of arrival a group is taken if the places left after it still hold
    every need. A group passed over once would be passed over always, so one pass
    does: a need that fills all places left stays so until they are full.
    """
    needs = _needs(step, deadlines, batch_groups)
    blocking = _blocking(needs, deadlines, arrived)
    if blocking is not None or len(arrived) < batch_groups:
        here = set(arrived)
        return Fill(
            None,
            tuple(
                sorted(
                    ticket
                    for ticket, deadline in deadlines.items()
                    if blocking is not None and deadline <= blocking and ticket not in here
                )
            ),
        )
    chosen: list[int] = []
    for ticket in arrived:
        left = batch_groups - len(chosen) - 1
        deadline = deadlines.get(ticket)
        if left >= 0 and all(
            need <= left for d, need in needs.items() if deadline is None or d < deadline
        ):
            chosen.append(ticket)
            needs = {
                d: need - (deadline is not None and deadline <= d) for d, need in needs.items()
            }
    return Fill(tuple(sorted(chosen)))


def give_up(
    step: int, deadlines: Mapping[int, int], arrived: Sequence[int], batch_groups: int
) -> tuple[int, ...]:
    """The stragglers without which `step` can be filled at once (`on_late: mask, drop`).

    Unarrived tickets, earliest deadline first, then lowest id, no more than
    needed. None when the batch can be filled with them, or not even without.
    """
    if len(arrived) < batch_groups:
        return ()
    here = set(arrived)
    kept = dict(deadlines)
    given: list[int] = []
    for _, ticket in sorted((d, ticket) for ticket, d in deadlines.items() if ticket not in here):
        if _blocking(_needs(step, kept, batch_groups), kept, arrived) is None:
            break
        given.append(ticket)
        del kept[ticket]
    return tuple(given)


def _tally(deadlines: Deadlines) -> list[tuple[int, int]]:
    values = deadlines.values() if isinstance(deadlines, Mapping) else deadlines
    return sorted(Counter(values).items())


def _needs(step: int, deadlines: Mapping[int, int], batch_groups: int) -> dict[int, int]:
    """need(d) at every d at which N grows; in between it only falls."""
    needs: dict[int, int] = {}
    started = 0
    for deadline, count in _tally(deadlines):
        started += count
        needs[deadline] = started - batch_groups * (deadline - step)
    return needs


def _blocking(
    needs: Mapping[int, int], deadlines: Mapping[int, int], arrived: Sequence[int]
) -> int | None:
    """The latest deadline whose need the arrived groups cannot meet."""
    here = [deadlines[ticket] for ticket in arrived if ticket in deadlines]
    unmet = [d for d, need in needs.items() if sum(deadline <= d for deadline in here) < need]
    return max(unmet, default=None)
