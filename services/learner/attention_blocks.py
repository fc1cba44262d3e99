"""Attention over a packed row by `scaled_dot_product_attention`, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.rl.packing import Row, blocks

BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Layout:
    """A row's blocks under one window, on its device."""

    sizes: list[int]  # queries of each block
    key_sizes: list[int]  # keys of each block
    keys: Tensor  # [sum of key_sizes] indices into the row
    masks: list[Tensor]  # bool [queries, keys] of each block


class BlockPlan:
    """See `attention.Plan`. No mask of the whole row is ever made."""

    def __init__(self, row: Row, device: torch.device, block_tokens: int = BLOCK_TOKENS) -> None:
        self._row, self._device, self._block_tokens = row, device, block_tokens
        self._depth = int(row.positions.max()) + 1  # of the longest sequence
        self._layouts: dict[int | None, Layout] = {}

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
        """See `attention.Plan`.

        Query heads that share a key head are stacked as further queries, so keys are
        never repeated.
        """
        layout = self._layout(window)
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
        repeat = heads // kv_heads
        keys = torch.split(key[0].transpose(0, 1).index_select(0, layout.keys), layout.key_sizes)
        values = torch.split(
            value[0].transpose(0, 1).index_select(0, layout.keys), layout.key_sizes
        )
        queries = torch.split(query[0], layout.sizes, 1)
        outputs = []
        for q, k, v, mask in zip(queries, keys, values, layout.masks, strict=True):
            size = q.shape[1]
            attended = _attend(
                q.reshape(1, kv_heads, repeat * size, dim),
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                mask.repeat(repeat, 1),
                scaling,
                cap,
            )
            outputs.append(attended.reshape(heads, size, -1).transpose(0, 1))
        return torch.cat(outputs)[None]

    def _layout(self, window: int | None) -> Layout:
        if window is not None and window >= self._depth:
            window = None
        if window not in self._layouts:
            made = blocks(self._row, self._block_tokens, window)
            self._layouts[window] = Layout(
                sizes=[block.end - block.start for block in made],
                key_sizes=[len(block.keys) for block in made],
                keys=torch.cat([block.keys for block in made]).to(self._device),
                masks=[block.mask.to(self._device) for block in made],
            )
        return self._layouts[window]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    cap: float | None,
) -> Tensor:
    if cap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scores = query @ key.transpose(2, 3)
    scores = scores * (query.shape[3] ** -0.5 if scaling is None else scaling)
    scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=3, dtype=torch.float32)
    return weights.to(value.dtype) @ value
