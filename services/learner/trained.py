"""How much of a model is trained, and how that leaves the trainer: its names, its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headway.jobspec import JobSpec
from services.learner.export import own_dtype, write_model
from services.learner.model import Policy, RunsRows
from services.learner.reference import load_reference


class Written(Protocol):
    """How what is trained becomes a Hugging Face folder."""

    dtype: torch.dtype
    """Of the tensors that `write` takes."""

    def write(self, target: Path, tensors: Mapping[str, Tensor]) -> None:
        """Writes a folder from all tensors by published name, whole or not at all."""


class WholeModel:
    """Every weight is trained."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self.dtype = own_dtype(source)

    def write(self, target: Path, tensors: Mapping[str, Tensor]) -> None:
        """See `Written`. Config and tokenizer are the source folder's."""
        write_model(self._source, target, tensors)


class Trained(Written, Protocol):
    """The parameters of a policy that want a gradient, and what belongs to them."""

    def freeze(self, dtype: torch.dtype) -> None:
        """Puts what is not trained into the dtype of matrix products."""

    def reference(self, dtype: torch.dtype, world: int, device: torch.device) -> RunsRows:
        """The policy as it is before any step, placed as the policy is."""

    def named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by parameter under the names by which they are published."""


class AllWeights(WholeModel):
    """All that a policy has."""

    def __init__(self, policy: Policy, source: Path) -> None:
        super().__init__(source)
        self._policy = policy

    def freeze(self, dtype: torch.dtype) -> None:
        """See `Trained`. There is nothing."""

    def reference(self, dtype: torch.dtype, world: int, device: torch.device) -> RunsRows:
        """See `Trained`. A second model."""
        return load_reference(self._source, dtype, world, device)

    def named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Trained`. The names of the model's files."""
        from transformers.core_model_loading import revert_weight_conversion

        named: dict[str, Tensor] = revert_weight_conversion(self._policy.lm, tensors)
        return named


def trained_part(policy: Policy, spec: JobSpec, source: Path) -> Trained:
    """What of a freshly loaded policy the job trains: its adapters, which it gains here, or all.

    InvalidSpec when adapters do not fit the model.
    """
    if spec.model.lora_rank:
        from services.learner.lora import Adapters

        return Adapters(policy, spec, source)
    return AllWeights(policy, source)
