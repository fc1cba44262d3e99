"""AdamW on a model's float32 weights: one update at a time, and the state of a checkpoint."""

from __future__ import annotations

import math
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headway.jobspec import OptimSpec
from headway.rl.lr import learning_rate
from services.learner.masters import Weights
from services.learner.sharding import whole


class Optimiser:
    """Of one model on one rank. `update` is a collective over the ranks."""

    def __init__(
        self,
        weights: Weights,
        settings: OptimSpec,
        *,
        total_steps: int,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._total_steps = total_steps
        self._weights = weights
        self.parameters = weights.parameters
        self._held: Future[Any] | None = None
        self._adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for parameter in self.parameters.values():  # so that a checkpoint has them from step 0
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def set_lr(self, step: int) -> float:
        """The learning rate of a training step, counted from 0, for its updates."""
        lr = learning_rate(
            step,
            peak=self._settings.lr,
            kind=self._settings.lr_scheduler_type,
            warmup_steps=self._settings.lr_warmup_steps,
            total_steps=self._total_steps,
        )
        for group in self._adamw.param_groups:
            group["lr"] = lr
        return lr

    def update(self, loss: float) -> tuple[float, bool]:
        """Applies the gradients there are, clipped: (their norm before, whether it was done).

        Nothing is done when `loss`, which is of all ranks, or the norm is not finite.
        """
        self._weights.collect()
        norm = self._gradient_norm()
        finite = math.isfinite(loss) and math.isfinite(float(norm))
        if finite:
            clip_grads_with_norm_(list(self.parameters.values()), self._settings.grad_clip, norm)
            self._wait_held()
            self._adamw.step()
            self.refresh()
        self._adamw.zero_grad(set_to_none=True)
        return float(norm), finite

    def hold(self, until: Future[Any]) -> None:
        """The next update waits until the future is done, however it ends."""
        self._held = until

    def refresh(self) -> None:
        """Makes the model compute with the parameters as they are now."""
        self._weights.refresh()

    def state(self, prefix: str = "") -> dict[str, dict[str, Tensor]]:
        """Weights, moments and counts of updates, by `prefix` and kind, then name; live."""
        state: dict[str, dict[str, Tensor]] = {
            prefix + kind: {} for kind in ("model", "exp_avg", "exp_avg_sq", "updates")
        }
        for name, parameter in self.parameters.items():
            moments = self._adamw.state[parameter]
            state[prefix + "model"][name] = parameter.detach()
            state[prefix + "exp_avg"][name] = moments["exp_avg"]
            state[prefix + "exp_avg_sq"][name] = moments["exp_avg_sq"]
            state[prefix + "updates"][name] = moments["step"]
        return state

    def _wait_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            wait([held])  # what it failed with is not the optimiser's matter

    def _gradient_norm(self) -> Tensor:
        """The norm over all ranks. A batch without gradient has zeros, and Adam still moves."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return whole(get_total_norm(gradients))
