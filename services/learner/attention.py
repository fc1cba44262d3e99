"""Attention over a packed row, as a `transformers` attention function."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headway.errors import InvalidSpec
from headway.rl.packing import Row
from services.learner.attention_blocks import BlockPlan

NAME = "headway_tree"


class Plan(Protocol):
    """How one row attends, on its device, ready for every layer."""

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
        """Each token attends to its ancestors and itself, at most `window` tokens.

        query [1, H, L, D], key and value [1, KV, L, D]; returns [1, L, H, D]. Scores are the
        products times `scaling` (None: D^-1/2), bounded by cap · tanh(score / cap).
        """


def plan(row: Row, device: torch.device) -> Plan:
    """FlexAttention on a GPU; elsewhere scaled_dot_product_attention, block by block."""
    if device.type == "cuda":
        # it brings a compiler, which a CPU does not need
        from services.learner.attention_flex import FlexPlan

        return FlexPlan.of(row, device)
    return BlockPlan(row, device)


def row_multiple(device: torch.device) -> int:
    """What a row's length is made a multiple of: few lengths, few compiled kernels."""
    return 128 if device.type == "cuda" else 1


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Plan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`Plan.attend` by the row's plan. Dropout is off: sampling had none.

    InvalidSpec for attention that this cannot express.
    """
    if tree is None:
        raise InvalidSpec(f"{type(module).__name__} does not pass attention arguments on")
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise InvalidSpec(
                f"{type(module).__name__} has attention sinks or biases ({name}), which packed"
                " rows do not support"
            )
    found = tree.attend(query, key, value, scaling=scaling, window=sliding_window, cap=softcap)
    return found, None
