"""The language-model head with the loss inside, so that [tokens, vocab] is never whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from services.learner.softmax import Room
from services.learner.vocabulary import WHOLE, Vocabulary

CHUNK_BYTES = 64 << 20  # float32 logits held at once

# (log-probs of some completion tokens, which tokens: a slice of the T) -> their summed loss
LossOf = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True, slots=True)
class Targets:
    """Which tokens the head's positions predict; see `packing.Row`."""

    source_of: Tensor  # [T] position in hidden, ascending
    tokens: Tensor  # [T] token ids


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What the head says about the T completion tokens; no gradient but the loss's."""

    loss: Tensor  # scalar
    logprobs: Tensor  # [T] float32
    entropy: Tensor  # [T] float32, of the distribution each token was drawn from


def policy_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Targets,
    temperature: float,
    loss_of: LossOf,
    entropy_weights: Tensor | None = None,
    vocabulary: Vocabulary = WHOLE,
    cap: float | None = None,
) -> HeadOutput:
    """log softmax(hidden Wᵀ / temperature) of the targets, and their loss.

    hidden [S, d], weight [V, d], bias [V] or None. Logits and softmax are float32; `cap` bounds
    logits by cap · tanh(logits / cap), before the temperature. `vocabulary` says which rows of
    the whole the weight has; ranks that share it make the same calls, and each gets the whole
    gradient of hidden.
    `loss_of` is called once a chunk, in order, with log-probs that want a gradient; it
    must be a sum over tokens; `entropy_weights` [T] times the tokens' entropies are taken from
    that sum (an entropy bonus). While a chunk's logits exist their gradient goes straight
    into those of hidden and weight, so nothing is recomputed in the backward pass and at
    most `CHUNK_BYTES` of logits (times a few) are held.
    """
    loss, logprobs, entropy = cast(
        tuple[Tensor, Tensor, Tensor],
        _PolicyHead.apply(  # type: ignore[no-untyped-call]
            hidden,
            weight,
            bias,
            targets,
            temperature,
            loss_of,
            entropy_weights,
            vocabulary,
            cap,
            torch.is_grad_enabled(),
        ),
    )
    return HeadOutput(loss, logprobs, entropy)


def chunk_rows(vocabulary: int) -> int:
    """Head positions a chunk."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


class _PolicyHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        temperature: float,
        loss_of: LossOf,
        entropy_weights: Tensor | None,
        vocabulary: Vocabulary,
        cap: float | None,
        wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = _Gradients(hidden, weight, bias) if wanted else None
        rows = chunk_rows(vocabulary.widest or weight.shape[0])
        rows = min(rows, max(1, hidden.shape[0]))
        bounds = torch.arange(0, hidden.shape[0] + rows, rows).clamp(max=hidden.shape[0])
        cuts = torch.searchsorted(targets.source_of, bounds.to(hidden.device)).tolist()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        logprobs, entropy = [], []
        room = Room(rows, weight, vocabulary)
        edges = zip(bounds.tolist(), cuts, strict=True)
        for (start, first), (end, last) in pairwise(edges):
            soft = room.softmax(hidden[start:end], weight, bias, temperature, cap)
            source = targets.source_of[first:last] - start
            target, here = vocabulary.locate(targets.tokens[first:last], weight.shape[0])
            leaf = vocabulary.pick(soft.logprobs, source, target, here).requires_grad_(wanted)
            logprobs.append(leaf.detach())
            entropy.append(soft.entropy[source])
            with torch.enable_grad():
                part = loss_of(leaf, slice(first, last))
            loss += part.detach()
            bonus = None
            if entropy_weights is not None:
                bonus = torch.zeros_like(soft.entropy)
                bonus.index_add_(0, source, entropy_weights[first:last])
                loss -= (bonus * soft.entropy).sum()
            if grads is not None:
                (slope,) = torch.autograd.grad(part, leaf)
                dlogits = soft.gradient(source, target, here, slope, bonus)
                grads.add(dlogits, hidden[start:end], weight, start)
        if grads is not None:
            vocabulary.sum(grads.hidden)
            grads.save(ctx)
        out = loss, torch.cat(logprobs), torch.cat(entropy)
        ctx.mark_non_differentiable(out[1], out[2])
        return out

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        scale = float(outputs[0])
        hidden, weight, bias = (
            saved if saved is None or scale == 1.0 else saved * scale for saved in ctx.saved_tensors
        )
        return (
            hidden,
            weight,
            bias,
            *[None] * 7,
        )


class _Gradients:
    """Gradients of one head call, added up chunk by chunk in float32."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.dtypes = hidden.dtype, weight.dtype
        self.hidden = torch.empty_like(hidden)
        # a frozen head has none
        self.weight = (
            torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        )
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add(self, dlogits: Tensor, hidden: Tensor, weight: Tensor, start: int) -> None:
        """Those of a chunk: float32 dlogits [S, V] of the hidden states from `start`, [S, d]."""
        if self.bias is not None:
            self.bias += dlogits.sum(dim=0)
        dlogits = dlogits.to(self.dtypes[1])
        torch.mm(dlogits, weight, out=self.hidden[start : start + len(hidden)])
        if self.weight is None:
            return
        if self.weight.dtype == dlogits.dtype:
            self.weight.addmm_(dlogits.t(), hidden)
        else:
            self.weight += dlogits.t() @ hidden

    def save(self, ctx: Any) -> None:
        """Keeps them for the backward pass, in the dtypes autograd expects."""
        bias = None if self.bias is None else self.bias.to(self.dtypes[1])
        weight = None if self.weight is None else self.weight.to(self.dtypes[1])
        ctx.save_for_backward(self.hidden, weight, bias)
