"""The softmax of a chunk of logits and its gradient, in few passes over memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.learner.vocabulary import WHOLE, Vocabulary

CACHE_BYTES = 2 << 20  # logits that a CPU's cache holds from one pass to the next


@dataclass(frozen=True, slots=True)
class Softmax:
    """Of S positions. Both [S, V] tensors are the room's and last until its next chunk."""

    logprobs: Tensor  # [S, V] float32
    probs: Tensor  # [S, V] their exponentials
    normaliser: Tensor  # [S] log Σ exp(logits), logits capped and divided by the temperature
    entropy: Tensor  # [S]
    temperature: float
    cap: float | None

    def gradient(
        self,
        source: Tensor,
        target: Tensor,
        here: Tensor | None,
        slope: Tensor,
        bonus: Tensor | None,
    ) -> Tensor:
        """d/d(raw logits) of Σ_t slope_t log p_t - Σ_s bonus_s entropy_s, [S, V].

        `source` [T] are positions, `target` and `here` [T] what `Vocabulary.locate` says, slope
        [T], bonus [S] or None. For logits
        that are capped and divided it is Σ_t slope_t (onehot(target_t) - p) + bonus p (log p +
        entropy); the raw ones' have another factor. Overwrites log-probs and probs.
        """
        slope = slope / self.temperature
        total = torch.zeros_like(self.entropy).index_add_(0, source, slope)
        factor = None
        if self.cap is not None:  # logits = cap / temperature · tanh(raw / cap)
            tanh = (self.logprobs + self.normaliser[:, None]).mul_(self.temperature / self.cap)
            factor = tanh.square_().neg_().add_(1.0)
        if bonus is None:
            found = self.probs.mul_(-total[:, None])
        else:
            bonus = bonus / self.temperature
            weights = self.logprobs.add_(self.entropy[:, None])
            found = self.probs.mul_(weights.mul_(bonus[:, None]).sub_(total[:, None]))
        if here is not None:
            slope = torch.where(here, slope, 0.0)
        found.index_put_((source, target), slope, accumulate=True)
        return found if factor is None else found.mul_(factor)


class Room:
    """Memory for one chunk of logits at a time."""

    def __init__(self, rows: int, weight: Tensor, vocabulary: Vocabulary = WHOLE) -> None:
        self._vocabulary = vocabulary
        self._logits = torch.empty(rows, weight.shape[0], dtype=torch.float32, device=weight.device)
        self._probs = torch.empty_like(self._logits)

    def softmax(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        cap: float | None = None,
    ) -> Softmax:
        """Of `hidden` [S, d] times weight [V, d] plus bias [V]; S is at most the room's rows.

        `cap` bounds raw logits by cap · tanh(raw / cap), before the temperature.
        """
        count = len(hidden)
        logits, probs = self._logits[:count], self._probs[:count]
        if hidden.dtype != torch.float32:
            logits.copy_(torch.nn.functional.linear(hidden, weight, bias))
        elif bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden, weight.t(), out=logits)
        normaliser, entropy = torch.empty(2, count, device=logits.device)
        step = count if logits.is_cuda else max(1, CACHE_BYTES // (4 * logits.shape[1]))
        for start in range(0, count, step):
            part = slice(start, start + step)
            z, p = logits[part], probs[part]
            if cap is not None:
                z.div_(cap).tanh_().mul_(cap)
            if temperature != 1.0:
                z.div_(temperature)
            torch.softmax(z, dim=1, out=p)
            # the largest probability is exact to rounding, the others may be 0
            normaliser[part] = z.amax(dim=1) - p.amax(dim=1).log_()
            z -= normaliser[part, None]
            entropy[part] = -torch.linalg.vecdot(p, z)
        if self._vocabulary.group is not None:
            mine, normaliser = normaliser, self._vocabulary.logsumexp(normaliser)
            shift = (mine - normaliser)[:, None]  # log of this part's share of the whole
            share = shift.exp()
            logits.add_(shift)
            probs.mul_(share)
            entropy = self._vocabulary.sum(share[:, 0] * (entropy - shift[:, 0]))
        return Softmax(logits, probs, normaliser, entropy, temperature, cap)
