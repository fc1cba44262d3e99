"""The float32 weights that an optimiser moves, and the model that computes with them.

They are the model's own parameters, or masters beside them where one rank computes in a narrower
dtype. The forward and backward pass see parameters in the compute dtype; the optimiser sees the
masters. Each parameter's gradient is added to its master's as soon as a row's backward pass
has made it, in float32, and is gone. Sharded ranks have FSDP2 for the same (`sharding.place`),
whose buffers and copies cost a single rank a fifth of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn


class Weights(Protocol):
    """Float32 parameters and the model that is made of them."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimiser moves, by name."""

    def collect(self) -> None:
        """Before an update: gives the parameters the gradients of all backward passes since.

        A collective over the ranks.
        """

    def refresh(self) -> None:
        """After the parameters have changed: makes the model compute with them."""


def float32_weights(model: nn.Module, dtype: torch.dtype, world: int) -> Weights:
    """Those of a model in its place, which computes in `dtype` from here on."""
    return Masters(model, dtype) if world == 1 and dtype != torch.float32 else OwnWeights(model)


class OwnWeights:
    """A model's own parameters, those that are trained."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def collect(self) -> None:
        """See `Weights`. They are where they belong."""

    def refresh(self) -> None:
        """See `Weights`. They are the model's."""


class Masters:
    """A model's trained parameters in float32, by name, beside its own in `dtype`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Takes the float32 parameters that are trained over; its own become `dtype` copies."""
        self._narrow = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.parameters = {
            name: nn.Parameter(narrow.detach()) for name, narrow in self._narrow.items()
        }
        for name, narrow in self._narrow.items():
            narrow.data = narrow.detach().to(dtype)
            narrow.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _into(self.parameters[name])
            )

    def collect(self) -> None:
        """See `Weights`. Hooks have done it, row by row."""

    @torch.no_grad()
    def refresh(self) -> None:
        """See `Weights`. Copies the masters into the model."""
        for name, narrow in self._narrow.items():
            narrow.copy_(self.parameters[name])


def _into(master: nn.Parameter) -> Callable[[Tensor], None]:
    def take(narrow: Tensor) -> None:
        gradient, narrow.grad = narrow.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    return take
