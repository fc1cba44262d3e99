"""The critic of PPO: a language model's body with one linear head, run on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headway.errors import InvalidSpec
from headway.rl.flops import DecoderShape
from services.learner.model import Backbone, DeviceRow, decoder_shape, load_policy
from services.learner.sharding import place

# values of a row's completion tokens [T], with gradient -> their summed loss
ValueLossOf = Callable[[Tensor], Tensor]


class Critic(Backbone):
    """The value of every completion token: what is expected before it is sampled.

    It is read where the token's own distribution would be, so completions that begin alike
    share values as they share inputs. As in `Policy`, the loss is inside the forward pass.
    """

    def __init__(self, body: Any, shape: DecoderShape) -> None:
        """A head of zeros: every value is 0 at first, on any rank."""
        super().__init__(body)
        self.shape = shape
        self.value_head = nn.Linear(shape.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, row: DeviceRow, loss_of: ValueLossOf) -> tuple[Tensor, Tensor]:
        """The loss, a scalar, and the values, float32 [T of the row], without gradient.

        The head's product is float32 whatever the body computes in: a narrow one would round
        values to a few steps between 0 and 1.
        """
        states = self.hidden(row)[row.sources].float()
        head = self.value_head
        values = F.linear(states, head.weight.float(), head.bias.float())[:, 0]
        values = values[row.targets.source_of]
        return loss_of(values), values.detach()


def load_critic(
    path: Path,
    dtype: torch.dtype,
    world: int,
    device: torch.device,
    *,
    vocabulary: int,
    gradient_checkpointing: bool = False,
) -> Critic:
    """A new critic over the body of a Hugging Face folder, in its place; float32 weights.

    InvalidSpec when the folder or its architecture cannot be trained, or does not know all
    token ids below `vocabulary`.
    """
    policy = load_policy(path, gradient_checkpointing=gradient_checkpointing)
    shape = decoder_shape(policy)
    if shape.vocab_size < vocabulary:
        raise InvalidSpec(
            f"critic.model.path {path} knows {shape.vocab_size} tokens and the policy {vocabulary}:"
            " a critic reads what the policy writes"
        )
    shape = replace(shape, vocab_size=1)
    critic = Critic(policy.lm.base_model, shape)
    place(critic, dtype, world, device)
    return critic
