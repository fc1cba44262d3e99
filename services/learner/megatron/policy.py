"""A Megatron model that runs packed rows, with the loss inside its forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from services.learner.head import HeadOutput, LossOf, policy_head
from services.learner.megatron.architecture import Architecture
from services.learner.model import DeviceRow
from services.learner.vocabulary import Vocabulary


class MegatronPolicy(nn.Module):
    """One tensor-parallel rank's part of a policy; every rank runs the same rows."""

    inv_freq: Tensor

    def __init__(self, model: Any, arch: Architecture, vocabulary: Vocabulary, rows: int) -> None:
        """`rows` of the head's weight are tokens; what is beyond makes all ranks' alike."""
        super().__init__()
        self.model = model
        self._tied = arch.tied
        self._vocabulary = vocabulary
        self._rows = rows
        self.register_buffer("inv_freq", arch.inv_freq, persistent=False)

    def forward(
        self,
        row: DeviceRow,
        temperature: float,
        loss_of: LossOf,
        entropy_weights: Tensor | None = None,
    ) -> HeadOutput:
        """Loss, log-probs and entropy of the row's completion tokens; see `policy_head`."""
        hidden = self.hidden(row)
        weight = self.model.shared_embedding_or_output_weight() if self._tied else None
        if weight is None:
            weight = self.model.output_layer.weight
        return policy_head(
            hidden[row.sources],
            weight[: self._rows],
            None,
            row.targets,
            temperature,
            loss_of,
            entropy_weights,
            vocabulary=self._vocabulary,
        )

    def hidden(self, row: DeviceRow) -> Tensor:
        """Last hidden states of a row, [L, d]."""
        embedded = self.model.embedding(input_ids=row.tokens, position_ids=row.positions)
        angles = row.positions[0, :, None].float() * self.inv_freq.float()
        states: Tensor = self.model.decoder(
            hidden_states=embedded,
            attention_mask=row.tree,
            rotary_pos_emb=torch.cat([angles, angles], dim=-1)[:, None, None],
        )
        return states[:, 0]
