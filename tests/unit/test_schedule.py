"""The lag rule, with numbers worked out by hand."""

import pytest

from headway.rl.schedule import Fill, feasible, fill, give_up, may_claim, room


@pytest.mark.parametrize(
    "deadlines, step, batch, right",
    [
        ([], 0, 1, True),
        ([5], 5, 1, True),
        ([4], 5, 1, False),  # its last step has passed
        ([5, 5], 5, 1, False),  # two due, one place
        ([5, 6], 5, 1, True),
        ([6, 6], 5, 1, True),  # one at step 5, one at 6
        ([6, 6, 6], 5, 1, False),
        ([7, 7, 6, 6, 5, 5], 5, 2, True),  # exactly full
        ([7, 6, 6, 6, 5, 5], 5, 2, False),  # N(6) = 5 > 4
        ({10: 3, 11: 3, 12: 4}, 3, 2, True),
    ],
)
def test_feasible(deadlines, step, batch, right):
    assert feasible(deadlines, step, batch) is right


def test_room_counts_what_started_before_and_later_crowding():
    # B = 2, s = 4, eta = 1, so u = 4 gives d = 5: 2 * 2 places up to step 5.
    assert room([], 4, 4, 1, 2) == 4
    assert room([4, 5, 5], 4, 4, 1, 2) == 1
    # An older node's deadline is 4: two places at step 4.
    assert room([5, 5], 4, 3, 1, 2) == 2
    # Three are due at 5 of four places in all: only one more fits, though step 4 is free.
    assert room([5, 5, 5], 4, 3, 1, 2) == 1
    assert room([4, 5, 5, 5], 4, 3, 1, 2) == 0


def test_a_version_too_old_gets_nothing():
    assert room([], step=4, version=2, max_policy_lag=1, batch_groups=2) == 0
    assert not may_claim([], 4, 2, 1, 2)
    assert may_claim([], 4, 3, 1, 2)


def test_on_policy_starts_exactly_one_batch_a_version():
    started = {}
    while may_claim(started, 0, 0, 0, 3):
        started[len(started)] = 0
    assert sorted(started) == [0, 1, 2]
    assert not may_claim(started, 1, 0, 0, 3)  # version 0 never again


def test_the_worked_example_of_the_docstring():
    # Step 0: four with deadline 1, tickets 1 and 3 came first.
    assert room(dict.fromkeys(range(4), 1), 0, 0, 1, 2) == 0
    assert fill(0, dict.fromkeys(range(4), 1), [3, 1], 2) == Fill((1, 3))
    # Step 1: 0 and 2 are due; 4 and 5 arrived but must wait.
    deadlines = {0: 1, 2: 1, 4: 2, 5: 2}
    assert room({0: 1, 2: 1}, 1, 1, 1, 2) == 2
    assert fill(1, deadlines, [4, 5], 2) == Fill(None, (0, 2))
    assert fill(1, deadlines, [4, 5, 2], 2) == Fill(None, (0,))
    assert fill(1, deadlines, [4, 5, 2, 0], 2) == Fill((0, 2))


def test_an_incomplete_batch_without_a_straggler_waits_for_nobody_in_particular():
    assert fill(0, {7: 2, 8: 2}, [7], 2) == Fill(None, ())


def test_arrival_order_decides_and_ids_ascend():
    # No need binds: B = 2, one due later; the first two to arrive are taken.
    assert fill(0, {1: 3, 2: 3, 3: 3}, [3, 2, 1], 2) == Fill((2, 3))


def test_a_later_deadline_may_bind_before_it_is_due():
    # B = 2, s = 0: three tickets must be trained by step 1 -> need(1) = 3 - 2 = 1.
    deadlines = {1: 1, 2: 1, 3: 1, 8: 5, 9: 5}
    assert fill(0, deadlines, [8, 9], 2) == Fill(None, (1, 2, 3))
    assert fill(0, deadlines, [8, 9, 2], 2) == Fill((2, 8))


def test_a_group_without_deadline_fills_but_is_never_needed():
    assert fill(4, {1: 4}, [77, 78, 1], 2) == Fill((1, 77))


def test_give_up_names_as_few_stragglers_as_needed_earliest_deadline_first():
    deadlines = {1: 1, 2: 1, 3: 1, 8: 5, 9: 5}
    assert give_up(0, deadlines, [8], 2) == ()  # the batch could not be filled anyway
    assert give_up(0, deadlines, [8, 9], 2) == (1,)  # need(1) falls from 1 to 0
    assert give_up(1, deadlines, [8, 9], 2) == (1, 2, 3)  # all due now
    assert give_up(0, deadlines, [8, 9, 2], 2) == ()  # no stall
    assert give_up(0, {4: 1, 3: 0, 8: 5}, [8], 1) == (3,)  # then N(1) = 1, need(1) = 1 - 1 = 0
