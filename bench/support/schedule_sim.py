"""The schedule's own simulation: slots, a learner and the lag rule, where nothing else takes time.

Versions install at once, claims and deliveries are free: what a fleet could reach at best
under headway/rl/schedule.py with these very lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from headway.rl.schedule import fill, room


@dataclass(frozen=True)
class Shape:
    """One fleet and one learner."""

    slots: int  # groups sampled at once, over all nodes
    batch: int
    lag: int
    train_s: float
    steps: int


def step_times(shape: Shape, group_s: Callable[[int], float]) -> list[float]:
    """When each step was done, in seconds; `group_s` is how long ticket k is sampled."""
    now = 0.0
    version = step = next_ticket = 0
    running: list[tuple[float, int]] = []  # heap: (end, ticket)
    deadlines: dict[int, int] = {}
    arrived: list[int] = []
    train_ends: float | None = None
    done: list[float] = []
    while len(done) < shape.steps:
        if train_ends is not None and now >= train_ends:
            done.append(now)
            train_ends, version = None, version + 1
        while running and running[0][0] <= now:
            arrived.append(heapq.heappop(running)[1])
        if train_ends is None:
            batch = fill(step, deadlines, arrived, shape.batch).ticket_ids
            if batch is not None:
                for ticket in batch:
                    del deadlines[ticket]
                    arrived.remove(ticket)
                step, train_ends = step + 1, now + shape.train_s
        while len(running) < shape.slots and room(deadlines, step, version, shape.lag, shape.batch):
            heapq.heappush(running, (now + group_s(next_ticket), next_ticket))
            deadlines[next_ticket] = version + shape.lag
            next_ticket += 1
        now = min([end for end, _ in running[:1]] + ([] if train_ends is None else [train_ends]))
    return done
