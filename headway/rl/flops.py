"""Floating-point operations of a training step, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.rl.packing import Row


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What a decoder's work depends on."""

    body_params: int  # weights that every token is multiplied with: no embeddings, no head
    num_layers: int
    attention_width: int  # query heads x head size
    hidden_size: int
    vocab_size: int
    frozen_params: int = 0  # of body_params: weights that get no gradient
    frozen_head: bool = False


def training_flops(shape: DecoderShape, rows: Iterable[Row]) -> int:
    """Operations of one forward and backward pass over packed rows.

    A product of a token with a weight is 2 operations, and 4 more going back: 2 for the gradient
    of the token, and 2 for that of the weight unless it is frozen. A query of
    depth d attends to d + 1 keys: 2 products of attention_width each. The head counts at
    the positions that run it. What gradient checkpointing computes again does not count.
    Source: PaLM, arXiv:2204.02311, appendix B (6 N + 12 L H Q T a token), for rows that
    are trees and a head that runs on some positions.
    """
    forward = spared = 0
    for row in rows:
        keys = int(row.positions.sum()) + len(row.positions)
        head = 2 * shape.vocab_size * shape.hidden_size * len(row.sources)
        forward += 2 * shape.body_params * len(row.tokens) + head
        forward += 4 * shape.num_layers * shape.attention_width * keys
        spared += 2 * shape.frozen_params * len(row.tokens) + (head if shape.frozen_head else 0)
    return 3 * forward - spared
