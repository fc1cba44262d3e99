"""Numbers of one rank made into numbers of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Every method is a collective over the ranks and answers the same on each."""

    world: int
    device: torch.device
    group: Any = None  # the process group of these ranks; None: all ranks

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def spread(self, name: str, values: Tensor) -> dict[str, float]:
        """`name`/mean, max and min of values that lie on all ranks; each rank may have none."""
        added, count = self.sum([float(values.sum()), float(len(values))])
        top, bottom = self.max([float(x.max()) if len(x) else -math.inf for x in (values, -values)])
        return {f"{name}/mean": added / max(count, 1.0), f"{name}/max": top, f"{name}/min": -bottom}

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op, group=self.group)
        return [float(value) for value in tensor]
