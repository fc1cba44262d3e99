"""How many input tokens a training row has at most: one forward and backward pass of one rank."""

from __future__ import annotations

from typing import Final

# The CPU's is reasoned in docs/adr/0005-one-rank-whole.md, the GPU's is a guess; neither is tuned.
CPU_ROW_TOKENS: Final = 2048
GPU_ROW_TOKENS: Final = 8192


def row_budget(wanted: int | None, *, on_gpu: bool) -> int:
    """`actor.ppo_max_token_len_per_gpu`, or the device's default."""
    if wanted is not None:
        return wanted
    return GPU_ROW_TOKENS if on_gpu else CPU_ROW_TOKENS
