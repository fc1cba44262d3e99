"""What goes wrong when: a seeded schedule of faults. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Kind = Literal["kill", "pause", "cut", "stalled", "deaf", "slow"]


@dataclass(frozen=True)
class Fault:
    """One fault. `target`: a process, or a link (`<process>-redis`, `<process>-coordinator`)."""

    kind: Kind
    target: str
    seconds: float  # how long a pause or a bad link lasts; after a kill, until its restart
    gap_s: float  # until the next fault begins


# Restarting a training process takes seconds, restarting a node one: so that the fleet is
# disturbed rather than merely down, the heavy ones come more seldom.
_KILLS = {"rollout": 10, "rank": 5, "learner": 3, "reward": 2, "coordinator": 2, "redis": 2}
_PAUSES = {"rollout": 8, "rank": 2, "learner": 1, "reward": 2, "coordinator": 2, "redis": 1}
_LINKS = {"rollout": 6, "learner": 3, "coordinator": 2, "reward": 1}
_KINDS: dict[Kind, int] = {"kill": 10, "pause": 6, "cut": 3, "stalled": 3, "deaf": 2, "slow": 2}


def faults(seed: int, nodes: int, lease_s: float, mean_gap_s: float) -> Iterator[Fault]:
    """An endless schedule; the same arguments, the same faults.

    Half of the pauses and partitions outlast a lease.
    """
    draw = random.Random(f"chaos:{seed}")
    while True:
        kind = _pick(draw, _KINDS)
        pool = {"kill": _KILLS, "pause": _PAUSES}.get(kind, _LINKS)
        target = _pick(draw, pool)
        if target == "rollout":
            target += f"-{draw.randrange(nodes)}"
        if kind not in ("kill", "pause"):
            # the coordinator and the reward service have one link each that matters
            to = "redis" if target == "coordinator" or draw.random() < 0.7 else "coordinator"
            target += "-coordinator" if target == "reward" else f"-{to}"
        seconds = draw.uniform(0.1, 1.0) if kind == "kill" else draw.uniform(0.1, 2.0) * lease_s
        yield Fault(kind, target, seconds, draw.uniform(0.2, 1.8) * mean_gap_s)


def _pick(draw: random.Random, weights: Mapping[T, int]) -> T:
    return draw.choices(list(weights), list(weights.values()))[0]
