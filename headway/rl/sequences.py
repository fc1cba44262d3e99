"""Which tokens belong to which completion, and sums over completions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """T tokens of `count` completions. Whole completions only; masks may have holes.

    Values that a mask hides may be non-finite: they never reach a result.
    """

    mask: Tensor  # bool [T]
    index: Tensor  # int64 [T] in 0..count
    count: int

    def lengths(self) -> Tensor:
        """Unmasked tokens of each completion, int64 [count]."""
        zeros = torch.zeros(self.count, dtype=torch.int64, device=self.mask.device)
        return zeros.index_add(0, self.index, self.mask.to(torch.int64))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of each completion, [count]; 0 for one that is wholly masked."""
        kept = torch.where(self.mask, values, torch.zeros_like(values))
        zeros = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.index, kept)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of each completion, [count]; 0 for one that is wholly masked."""
        return self.sum(values) / self.lengths().clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """Largest value of each completion, [count]; 0 for one that is wholly masked."""
        lowest = torch.full((self.count,), -torch.inf, dtype=values.dtype, device=values.device)
        kept = torch.where(self.mask, values, -torch.inf)
        largest = lowest.scatter_reduce(0, self.index, kept, "amax")
        return torch.where(self.lengths() > 0, largest, torch.zeros_like(largest))

    def spread(self, values: Tensor) -> Tensor:
        """A value of each completion, [count], for each of its tokens, [T]."""
        return values[self.index]
