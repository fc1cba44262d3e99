"""Simulated fleets under the lag rule: never a breach, never a deadlock, whoever dies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.rl.schedule import feasible, fill, give_up, may_claim

NUM_STEPS = 8
LONGEST = 30  # units of work of the longest answer
LEASE_TICKS = 40


@dataclass
class Running:
    """One ticket in the works on one node."""

    ticket: int
    ends: int  # tick
    fate: str  # delivered, filtered, lost


@dataclass(frozen=True)
class Fleet:
    batch: int
    lag: int
    on_late: str
    speeds: tuple[int, ...]  # ticks a unit of work, per node
    slots: int  # tickets at once, per node
    train_ticks: int
    publish_ticks: int
    lengths: str  # constant, two, tailed
    long_share: float
    lost_share: float
    filtered_share: float
    node_death: float  # a node's chance to die, a tick
    learner_death: float  # the learner's, a step
    seed: int


FLEETS = st.builds(
    Fleet,
    batch=st.integers(1, 5),
    lag=st.integers(0, 4),
    on_late=st.sampled_from(["wait", "mask", "drop"]),
    speeds=st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple),
    slots=st.integers(1, 6),
    train_ticks=st.integers(1, 10),
    publish_ticks=st.integers(0, 10),
    lengths=st.sampled_from(["constant", "two", "tailed"]),
    long_share=st.floats(0, 0.9),
    lost_share=st.floats(0, 0.5),
    filtered_share=st.floats(0, 0.5),
    node_death=st.sampled_from([0.0, 0.0, 0.001, 0.01]),
    learner_death=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32),
)


class World:
    """Ticks of one fleet and one learner; every decision is the schedule's."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.random = random.Random(fleet.seed)
        self.step = 0  # next step to take
        self.deadlines: dict[int, int] = {}
        self.start: dict[int, int] = {}
        self.late: set[int] = set()  # let go by: without a deadline, their old tokens masked
        self.given_up: set[int] = set()  # dropped: what their nodes deliver is refused
        self.arrived: list[int] = []
        self.claimable: list[int] = []
        self.next_ticket = 0
        self.versions = [0] * len(fleet.speeds)
        self.published = 0
        self.running: list[list[Running]] = [[] for _ in fleet.speeds]
        self.installs: list[tuple[int, int, int]] = []  # tick, node, version
        self.learner_free = 0
        self.trained: list[tuple[int, ...]] = []
        self.most_started = Counter[int]()  # step -> most tickets started and not taken

    def run(self) -> None:
        # Half of all tries at worst are lost or filtered; 400 rounds of the longest work
        # without one step is no bad luck.
        round_ticks = LONGEST * max(self.fleet.speeds) + 3 * self.fleet.train_ticks + LEASE_TICKS
        progress = 0
        for tick in range(10**6):
            done = len(self.trained)
            self._install(tick)
            self._die(tick)
            self._end_work(tick)
            self._claim(tick)
            self._train(tick)
            if done < len(self.trained):
                progress = tick
            if len(self.trained) == NUM_STEPS:
                return
            assert tick - progress < 400 * round_ticks, "deadlock"

    def _install(self, tick: int) -> None:
        for due, node, version in [i for i in self.installs if i[0] <= tick]:
            self.versions[node] = max(self.versions[node], version)
            self.installs.remove((due, node, version))

    def _die(self, tick: int) -> None:
        """Its leases run out later; the node comes back with the newest published version."""
        if not self.fleet.node_death:
            return
        for node, work in enumerate(self.running):
            if self.random.random() < self.fleet.node_death:
                for item in work:
                    item.fate = "lost"
                    item.ends = max(item.ends, tick + LEASE_TICKS)
                self.versions[node] = self.published

    def _end_work(self, tick: int) -> None:
        for work in self.running:
            for item in [item for item in work if item.ends <= tick]:
                work.remove(item)
                if item.ticket in self.given_up:
                    continue
                if item.fate == "delivered":
                    self.arrived.append(item.ticket)
                    continue
                self.deadlines.pop(item.ticket, None)  # no deadline until claimed again
                self.late.discard(item.ticket)
                if item.fate == "lost":
                    self.claimable.append(item.ticket)

    def _claim(self, tick: int) -> None:
        for node, work in enumerate(self.running):
            version = self.versions[node]
            while len(work) < self.fleet.slots and may_claim(
                self.deadlines, self.step, version, self.fleet.lag, self.fleet.batch
            ):
                ticket = self._next()
                self.deadlines[ticket] = version + self.fleet.lag
                self.start[ticket] = version
                work.append(self._begin(ticket, node, tick))
                assert feasible(self.deadlines, self.step, self.fleet.batch)
        self.most_started[self.step] = max(self.most_started[self.step], len(self.deadlines))

    def _next(self) -> int:
        if self.claimable:
            self.claimable.sort()
            return self.claimable.pop(0)
        self.next_ticket += 1
        return self.next_ticket - 1

    def _begin(self, ticket: int, node: int, tick: int) -> Running:
        fates = (self.fleet.lost_share, self.fleet.filtered_share)
        fate = self.random.choices(
            ("lost", "filtered", "delivered"), (*fates, max(0.2, 1 - sum(fates)))
        )[0]
        return Running(ticket, tick + self._length() * self.fleet.speeds[node], fate)

    def _length(self) -> int:
        if self.fleet.lengths == "constant":
            return 3
        if self.fleet.lengths == "tailed":
            return min(LONGEST, int(self.random.paretovariate(1.1)))
        draw = self.random.random
        return LONGEST if draw() < self.fleet.long_share else 1 + int(3 * draw())

    def _train(self, tick: int) -> None:
        if tick < self.learner_free:
            return
        if self.fleet.on_late != "wait":
            self._give_up()
        batch = fill(self.step, self.deadlines, self.arrived, self.fleet.batch).ticket_ids
        if batch is None:
            return
        assert len(batch) == self.fleet.batch
        for ticket in batch:
            lag = self.step - self.start[ticket]
            assert ticket in self.late or 0 <= lag <= self.fleet.lag, "lag breach"
            self.deadlines.pop(ticket, None)
            self.arrived.remove(ticket)
        self.trained.append(batch)
        self.step += 1
        assert feasible(self.deadlines, self.step, self.fleet.batch)
        self.learner_free = tick + self.fleet.train_ticks
        if self.random.random() < self.fleet.learner_death:  # retraces two steps, publishes late
            self.learner_free += 2 * self.fleet.train_ticks
        self.published = self.step
        for node in range(len(self.versions)):
            lands = self.learner_free + self.random.randint(0, self.fleet.publish_ticks)
            self.installs.append((lands, node, self.step))

    def _give_up(self) -> None:
        for ticket in give_up(self.step, self.deadlines, self.arrived, self.fleet.batch):
            del self.deadlines[ticket]
            (self.late if self.fleet.on_late == "mask" else self.given_up).add(ticket)


@settings(max_examples=100, deadline=None)
@given(FLEETS)
def test_any_fleet_trains_on_without_a_breach(fleet: Fleet):
    world = World(fleet)
    world.run()
    taken = [ticket for batch in world.trained for ticket in batch]
    assert len(set(taken)) == len(taken) == NUM_STEPS * fleet.batch
    assert fleet.on_late == "mask" or not world.late
    assert fleet.on_late == "drop" or not world.given_up
    for started in world.most_started.values():
        assert started <= fleet.batch * (fleet.lag + 1)


@settings(max_examples=40, deadline=None)
@given(FLEETS)
def test_lag_zero_is_a_synchronous_trainer(fleet: Fleet):
    world = World(replace(fleet, lag=0))
    world.run()
    assert not world.late and not world.given_up
    for step, batch in enumerate(world.trained):
        assert [world.start[ticket] for ticket in batch] == [step] * fleet.batch


@settings(max_examples=30, deadline=None)
@given(FLEETS)
def test_lag_zero_without_losses_takes_the_tickets_in_order(fleet: Fleet):
    world = World(replace(fleet, lag=0, lost_share=0.0, filtered_share=0.0, node_death=0.0))
    world.run()
    taken = [ticket for batch in world.trained for ticket in batch]
    assert taken == list(range(NUM_STEPS * fleet.batch))
