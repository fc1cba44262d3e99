"""From a loss per token to one number."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(values: Tensor, mask: Tensor, global_count: int) -> Tensor:
    """Sum over the mask divided by the count of response tokens of the whole batch.

    values [T], mask bool [T], both of any part of the batch; `global_count` is the sum
    of the masks over all parts and ranks of the optimiser update. The parts' results
    then add up to the same mean however the batch is cut. Masked values may be
    non-finite. An empty batch (count 0) gives zero.
    Source: DAPO, arXiv:2503.14476, eq. 8 (`loss_agg_mode: token-mean` in verl).
    """
    total = torch.where(mask, values, torch.zeros_like(values)).sum()
    return total / max(global_count, 1)
