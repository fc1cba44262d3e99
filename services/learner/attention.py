"""Attention over a packed row, block by block, as a `transformers` attention function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headway.errors import InvalidSpec
from headway.rl.packing import Block, Row, blocks

NAME = "headway_tree"
BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Layout:
    """How one row attends, on its device, ready for every layer."""

    sizes: list[int]  # queries of each block
    key_sizes: list[int]  # keys of each block
    keys: Tensor  # [sum of key_sizes] indices into the row
    masks: list[Tensor]  # bool [queries, keys] of each block
    depth: int  # longest sequence in the row


def layout(row: Row, device: torch.device, block_tokens: int = BLOCK_TOKENS) -> Layout:
    """The attention plan of a row."""
    made: Sequence[Block] = blocks(row, block_tokens)
    return Layout(
        sizes=[block.end - block.start for block in made],
        key_sizes=[len(block.keys) for block in made],
        keys=torch.cat([block.keys for block in made]).to(device),
        masks=[block.mask.to(device) for block in made],
        depth=int(row.positions.max()) + 1,
    )


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Each token attends to its ancestors and itself.

    Shapes: query [1, H, L, D], key and value [1, KV, L, D]; returns [1, L, H, D].
    Query heads that share a key head are stacked as further queries, so keys are
    never repeated. Dropout is off: sampling had none. InvalidSpec for attention that
    this cannot express.
    """
    if tree is None:
        raise InvalidSpec(f"{type(module).__name__} does not pass attention arguments on")
    if sliding_window is not None and tree.depth > sliding_window:
        raise InvalidSpec(
            f"a sequence of {tree.depth} tokens exceeds the model's attention window of"
            f" {sliding_window}: set model.max_model_len to at most {sliding_window}"
        )
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise InvalidSpec("models with attention soft-capping or attention sinks cannot be trained")
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    repeat = heads // kv_heads
    keys = torch.split(key[0].transpose(0, 1).index_select(0, tree.keys), tree.key_sizes)
    values = torch.split(value[0].transpose(0, 1).index_select(0, tree.keys), tree.key_sizes)
    queries = torch.split(query[0], tree.sizes, 1)
    outputs = []
    for q, k, v, mask in zip(queries, keys, values, tree.masks, strict=True):
        size = q.shape[1]
        out = F.scaled_dot_product_attention(
            q.reshape(1, kv_heads, repeat * size, dim),
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask.repeat(repeat, 1),
            scale=scaling,
        )
        outputs.append(out.reshape(heads, size, -1).transpose(0, 1))
    return torch.cat(outputs)[None], None
