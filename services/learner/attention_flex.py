"""Attention over a packed row by FlexAttention: one fused kernel, blocks without a key skipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from headway.rl.packing import Row

# (batch, head, query, key) as 0-dim tensors -> whether the query sees the key
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_mod(ends: Tensor, positions: Tensor, window: int | None) -> MaskMod:
    """`packing.visible` as FlexAttention asks for it; ends and positions are the row's, [L]."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    if window is None:
        return seen
    nearest = window

    def seen_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen(batch, head, query, key) & (positions[query] - positions[key] < nearest)

    return seen_near


def score_mod(cap: float) -> ScoreMod:
    """Bounds scores by cap · tanh(score / cap)."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


class FlexPlan:
    """See `attention.Plan`. Compiled on a GPU; on a CPU, for tests, plain and forward only."""

    def __init__(self, ends: Tensor, positions: Tensor) -> None:
        self._ends, self._positions = ends, positions
        self._depth = int(positions.max()) + 1
        self._masks: dict[int | None, BlockMask] = {}

    @staticmethod
    def of(row: Row, device: torch.device) -> FlexPlan:
        """The plan of a row; moves its description to the device."""
        return FlexPlan(row.ends.to(device), row.positions.to(device))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        cap: float | None,
    ) -> Tensor:
        """See `attention.Plan`."""
        repeat = query.shape[1] // key.shape[1]
        grouped = repeat & (repeat - 1) == 0  # its kernels share a key among 2^i query heads
        if not grouped:
            key = key.repeat_interleave(repeat, dim=1)
            value = value.repeat_interleave(repeat, dim=1)
        found: Tensor = _kernel(query.device.type)(
            query,
            key,
            value,
            score_mod=None if cap is None else score_mod(cap),
            block_mask=self.block_mask(window),
            scale=scaling,
            enable_gqa=grouped and repeat > 1,
        )
        return found.transpose(1, 2)

    def block_mask(self, window: int | None) -> BlockMask:
        """Which blocks of keys each block of queries needs, made once a row."""
        if window is not None and window >= self._depth:
            window = None
        if window not in self._masks:
            length = len(self._ends)
            self._masks[window] = create_block_mask(
                mask_mod(self._ends, self._positions, window),
                B=None,
                H=None,
                Q_LEN=length,
                KV_LEN=length,
                device=self._ends.device,
            )
        return self._masks[window]


@cache
def _kernel(device_type: str) -> Any:
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention)
