"""Which part of the vocabulary a rank's head holds, and sums over the ranks that hold the rest.

Every method is a collective over the group where there is one; its ranks have the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids from `start` on, as many as the head's weight has rows.

    The rows of the ranks of `group` make up the whole vocabulary; None: this rank has all of it.
    `widest` is the largest number of rows on a rank: work is cut alike on all.
    """

    start: int = 0
    widest: int = 0
    group: Any = None

    def logsumexp(self, mine: Tensor) -> Tensor:
        """log Σ exp over the whole vocabulary, [S], from that of this rank's part."""
        if self.group is None:
            return mine
        parts = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts).logsumexp(dim=0)

    def locate(self, targets: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
        """The column of each target [T], and which are here (None: all); 0 for one elsewhere."""
        if self.group is None:
            return targets, None
        columns = targets - self.start
        here = (columns >= 0) & (columns < rows)
        return torch.where(here, columns, 0), here

    def pick(self, logits: Tensor, source: Tensor, columns: Tensor, here: Tensor | None) -> Tensor:
        """The logits of the targets [T], whichever rank has them; what `locate` said of them."""
        found = logits[source, columns]
        return found if here is None else self.sum(torch.where(here, found, 0.0))

    def sum(self, parts: Tensor) -> Tensor:
        """Adds up what each rank has of it, in place."""
        if self.group is not None:
            dist.all_reduce(parts, group=self.group)
        return parts


WHOLE = Vocabulary()
