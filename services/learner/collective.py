"""How rank 0 tells the other ranks what to do next: small integer tensors, nothing pickled.

    header  int64 [4]        what, step, number of ids, number of late ids
    ids     int64 [n]        the batch's ticket ids in order
    late    int64 [m]        those trained with their too old tokens masked

The default process group carries them (its CPU backend). Ranks above 0 wait in
`receive`; while rank 0 waits for groups it sends IDLE often enough that nobody's
collective times out.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
IDLE_EVERY_S = 60.0


class What(enum.IntEnum):
    """The calls that all ranks make together."""

    IDLE = 0
    TRAIN = 1
    WEIGHTS = 2  # gather the weights for a publish
    SAVE = 3
    EXPORT = 4
    LOAD = 5
    STOP = 6


@dataclass(frozen=True, slots=True)
class Order:
    """One thing all ranks do at the same point."""

    what: What
    step: int = 0
    ids: tuple[int, ...] = ()
    late: frozenset[int] = frozenset()


def send(order: Order, world: int) -> None:
    """Rank 0: gives an order to the other ranks; nothing to do when there are none."""
    if world == 1:
        return
    late = sorted(order.late)
    _broadcast([order.what, order.step, len(order.ids), len(late)])
    if order.ids:
        _broadcast(order.ids)
    if late:
        _broadcast(late)


def receive() -> Order:
    """Ranks above 0: waits for the next order."""
    what, step, num_ids, num_late = _broadcast([0, 0, 0, 0])
    ids = _broadcast([0] * num_ids) if num_ids else []
    late = _broadcast([0] * num_late) if num_late else []
    return Order(What(what), step, tuple(ids), frozenset(late))


def _broadcast(values: Sequence[int] | Collection[int]) -> list[int]:
    tensor = torch.tensor(list(values), dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return [int(value) for value in tensor]
