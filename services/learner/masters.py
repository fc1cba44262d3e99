"""float32 masters of a policy that computes in a narrower dtype, on one rank.

The forward and backward pass see parameters in the compute dtype; the optimiser sees the
masters. Each parameter's gradient is added to its master's as soon as a row's backward pass
has made it, in float32, and is gone. Sharded ranks have FSDP2 for the same (`sharding.place`),
whose buffers and copies cost a single rank a fifth of its step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Masters:
    """A model's float32 parameters, by name, beside its own in `dtype`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Takes the model's float32 parameters over; its own become `dtype` copies."""
        self._narrow = dict(model.named_parameters())
        self.parameters = {
            name: nn.Parameter(narrow.detach()) for name, narrow in self._narrow.items()
        }
        for name, narrow in self._narrow.items():
            narrow.data = narrow.detach().to(dtype)
            narrow.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _into(self.parameters[name])
            )

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the masters into the model: after an update, and after loading them."""
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
