"""A packed form that may be a view of what was sent gets memory of its own; others need none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.weights import in_place


class Kernel(ABC):
    """A way of multiplying that keeps its own form of a weight, as vLLM's CPU layers do."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.form = self.packed(layer.weight.detach())
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: Any, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return inputs @ layer.form

    @abstractmethod
    def packed(self, weight: Tensor) -> Tensor: ...


class Copies(Kernel):
    def packed(self, weight: Tensor) -> Tensor:
        return weight.t().contiguous()


class Views(Kernel):
    def packed(self, weight: Tensor) -> Tensor:
        return weight.t()


@pytest.mark.parametrize("kernel", [Copies, Views])
def test_what_a_layer_samples_with_outlives_the_memory_it_came_in(kernel: type[Kernel]) -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    layer.quant_method = kernel()
    staging = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for version in range(2):
        staging.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]) + version)
        in_place._pack(layer, staging)
        staging.fill_(-1.0)  # the next version arrives
        answer = layer.quant_method.apply(layer, torch.eye(3)[[1]], None)
        assert answer.tolist() == [[2.0 + version, 5.0 + version]]
    shares = layer.form.untyped_storage().data_ptr() == staging.untyped_storage().data_ptr()
    assert not shares
