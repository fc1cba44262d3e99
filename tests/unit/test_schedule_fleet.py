"""Simulated fleets under the lag rule: never a breach, never a deadlock."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.rl.schedule import feasible, fill, may_claim

NUM_STEPS = 8


@dataclass
class Running:
    """One ticket in the works on one node."""

    ticket: int
    start_version: int
    ends: int  # tick; a lost lease ends too
    fate: str  # delivered, filtered, lost


@dataclass(frozen=True)
class Fleet:
    batch: int
    lag: int
    speeds: tuple[int, ...]  # ticks a unit of work, per node
    slots: int  # tickets at once, per node
    train_ticks: int
    publish_ticks: int
    long_share: float
    lost_share: float
    filtered_share: float
    seed: int


FLEETS = st.builds(
    Fleet,
    batch=st.integers(1, 5),
    lag=st.integers(0, 4),
    speeds=st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple),
    slots=st.integers(1, 6),
    train_ticks=st.integers(1, 10),
    publish_ticks=st.integers(0, 10),
    long_share=st.floats(0, 0.9),
    lost_share=st.floats(0, 0.5),
    filtered_share=st.floats(0, 0.5),
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
        self.arrived: list[int] = []
        self.claimable: list[int] = []
        self.next_ticket = 0
        self.versions = [0] * len(fleet.speeds)
        self.running: list[list[Running]] = [[] for _ in fleet.speeds]
        self.installs: list[tuple[int, int, int]] = []  # tick, node, version
        self.learner_free = 0
        self.trained: list[tuple[int, ...]] = []
        self.most_started = Counter[int]()  # step -> most tickets started and not taken

    def run(self) -> None:
        longest = 30 * max(self.fleet.speeds)
        progress = 0
        for tick in range(10**6):
            done = len(self.trained)
            self._install(tick)
            self._end_work(tick)
            self._claim(tick)
            self._train(tick)
            if done < len(self.trained):
                progress = tick
            if len(self.trained) == NUM_STEPS:
                return
            # Half of all tries at worst are lost or filtered; 400 rounds of the longest
            # work without one step is no bad luck.
            assert tick - progress < 400 * (longest + self.fleet.train_ticks + 20), "deadlock"

    def _install(self, tick: int) -> None:
        for due, node, version in [i for i in self.installs if i[0] <= tick]:
            self.versions[node] = max(self.versions[node], version)
            self.installs.remove((due, node, version))

    def _end_work(self, tick: int) -> None:
        for work in self.running:
            for item in [item for item in work if item.ends <= tick]:
                work.remove(item)
                if item.fate == "delivered":
                    self.arrived.append(item.ticket)
                    continue
                del self.deadlines[item.ticket]  # no deadline until claimed again
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
        draw = self.random.random
        length = 30 if draw() < self.fleet.long_share else 1 + int(3 * draw())
        fates = (self.fleet.lost_share, self.fleet.filtered_share)
        fate = self.random.choices(
            ("lost", "filtered", "delivered"), (*fates, max(0.2, 1 - sum(fates)))
        )[0]
        ends = tick + length * self.fleet.speeds[node]
        return Running(ticket, self.versions[node], ends, fate)

    def _train(self, tick: int) -> None:
        if tick < self.learner_free:
            return
        batch = fill(self.step, self.deadlines, self.arrived, self.fleet.batch).ticket_ids
        if batch is None:
            return
        assert len(batch) == self.fleet.batch
        for ticket in batch:
            assert 0 <= self.step - self.start[ticket] <= self.fleet.lag, "lag breach"
            del self.deadlines[ticket]
            self.arrived.remove(ticket)
        self.trained.append(batch)
        self.step += 1
        assert feasible(self.deadlines, self.step, self.fleet.batch)
        self.learner_free = tick + self.fleet.train_ticks
        for node in range(len(self.versions)):
            lands = self.learner_free + self.random.randint(0, self.fleet.publish_ticks)
            self.installs.append((lands, node, self.step))


@settings(max_examples=80, deadline=None)
@given(FLEETS)
def test_any_fleet_trains_on_without_a_breach(fleet: Fleet):
    world = World(fleet)
    world.run()
    taken = [ticket for batch in world.trained for ticket in batch]
    assert len(set(taken)) == len(taken) == NUM_STEPS * fleet.batch
    for started in world.most_started.values():
        assert started <= fleet.batch * (fleet.lag + 1)


@settings(max_examples=40, deadline=None)
@given(FLEETS)
def test_lag_zero_is_a_synchronous_trainer(fleet: Fleet):
    world = World(Fleet(**{**vars(fleet), "lag": 0}))
    world.run()
    for step, batch in enumerate(world.trained):
        assert [world.start[ticket] for ticket in batch] == [step] * fleet.batch


@settings(max_examples=30, deadline=None)
@given(FLEETS)
def test_lag_zero_without_losses_takes_the_tickets_in_order(fleet: Fleet):
    world = World(Fleet(**{**vars(fleet), "lag": 0, "lost_share": 0.0, "filtered_share": 0.0}))
    world.run()
    taken = [ticket for batch in world.trained for ticket in batch]
    assert taken == list(range(NUM_STEPS * fleet.batch))
