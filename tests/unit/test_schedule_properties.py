"""The schedule's functions against brute force over all small cases that Hypothesis draws."""

from __future__ import annotations

from itertools import combinations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.rl.schedule import feasible, fill, give_up, room


@st.composite
def moments(draw):
    """step, B, deadlines by ticket that keep (F), and the order of those that have arrived."""
    step, batch = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    deadlines: dict[int, int] = {}
    for ticket in range(draw(st.integers(0, 8))):
        more = {**deadlines, ticket: step + draw(st.integers(0, 3))}
        if feasible(more, step, batch):
            deadlines = more
    started = draw(st.permutations(sorted(deadlines)))
    late = [100 + i for i in range(draw(st.integers(0, 2)))]  # without a deadline
    arrived = started[: draw(st.integers(0, len(started)))] + late
    return step, batch, deadlines, draw(st.permutations(arrived))


def completions(step, batch, deadlines, arrived):
    """All batches, as places in the order of arrival, that leave (F) true for the next step."""
    for places in combinations(range(len(arrived)), batch):
        chosen = {arrived[place] for place in places}
        rest = {ticket: d for ticket, d in deadlines.items() if ticket not in chosen}
        if feasible(rest, step + 1, batch):
            yield places


@settings(max_examples=300, deadline=None)
@given(moments(), st.integers(0, 4), st.integers(0, 3))
def test_room_is_the_most_that_fits(moment, age, lag):
    step, batch, deadlines, _ = moment
    version = step - age
    fits = room(deadlines, step, version, lag, batch)
    values = list(deadlines.values())
    assert feasible(values + [version + lag] * fits, step, batch) or fits == 0
    assert not feasible(values + [version + lag] * (fits + 1), step, batch)


@settings(max_examples=500, deadline=None)
@given(moments())
def test_fill_takes_the_first_arrived_of_all_batches_that_keep_the_rule(moment):
    step, batch, deadlines, arrived = moment
    possible = list(completions(step, batch, deadlines, arrived))
    filled = fill(step, deadlines, arrived, batch)
    if not possible:
        assert filled.ticket_ids is None
    else:
        assert filled.ticket_ids == tuple(sorted(arrived[place] for place in min(possible)))
        assert filled.waiting_for == ()


@settings(max_examples=100, deadline=None)
@given(moments())
def test_a_stalled_step_names_exactly_whom_it_cannot_do_without(moment):
    step, batch, deadlines, arrived = moment
    filled = fill(step, deadlines, arrived, batch)
    assume(filled.ticket_ids is None and len(arrived) >= batch)
    assert filled.waiting_for
    assert not set(filled.waiting_for) & set(arrived)
    others = [t for t in deadlines if t not in filled.waiting_for and t not in arrived]
    assert fill(step, deadlines, [*arrived, *others], batch).ticket_ids is None
    everyone = [*arrived, *others, *filled.waiting_for]
    assert fill(step, deadlines, everyone, batch).ticket_ids is not None


@settings(max_examples=300, deadline=None)
@given(moments())
def test_no_fewer_stragglers_could_be_given_up(moment):
    step, batch, deadlines, arrived = moment
    given_up = give_up(step, deadlines, arrived, batch)
    stragglers = [ticket for ticket in deadlines if ticket not in arrived]
    assert set(given_up) <= set(stragglers)

    def fills_without(gone) -> bool:
        kept = {ticket: d for ticket, d in deadlines.items() if ticket not in gone}
        return fill(step, kept, arrived, batch).ticket_ids is not None

    assert fills_without(given_up) == (len(arrived) >= batch)
    for fewer in range(len(given_up)):
        assert not any(fills_without(gone) for gone in combinations(stragglers, fewer))
