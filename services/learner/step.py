"""One optimiser update's forward and backward passes: tensors in, gradients and sums out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.jobspec import AlgorithmSpec
from headway.rl import metrics
from headway.rl.aggregate import token_mean
from headway.rl.corrections import correct
from headway.rl.losses import ppo_clip
from headway.rl.packing import Row, Sample, pack
from services.learner.batch import Batch
from services.learner.head import HeadOutput
from services.learner.model import DeviceRow, Policy
from services.learner.sharding import last_backward

ROW_TOKENS = 1024  # input tokens a row; one forward and backward pass each


@dataclass(slots=True)
class Share:
    """A rank's share of a mini-batch on the device, with its rows packed."""

    batch: Batch
    rows: list[Row]
    advantages: Tensor  # [T]
    rollout_logprobs: Tensor  # [T]
    mask: Tensor  # bool [T]
    old_logprobs: Tensor | None = None  # [T] π_old when it is not the update's own π


@dataclass(slots=True)
class Recorded:
    """What an update's rows said, over all T tokens of a share; filled row by row."""

    logprobs: Tensor  # [T]
    entropy: Tensor  # [T]
    kept: Tensor  # bool [T]
    clipped: Tensor  # bool [T]
    clipped_low: Tensor  # bool [T]
    loss: float = 0.0

    @staticmethod
    def empty(count: int, device: torch.device) -> Recorded:
        """Zeros and falses."""
        zeros = torch.zeros(count, device=device)
        no = torch.zeros(count, dtype=torch.bool, device=device)
        return Recorded(zeros, zeros.clone(), no, no.clone(), no.clone())


def make_share(batch: Batch, device: torch.device, row_tokens: int = ROW_TOKENS) -> Share:
    """Packs a batch and moves it to the device."""
    return Share(
        batch=batch,
        rows=pack(batch.samples, row_tokens),
        advantages=batch.advantages.to(device),
        rollout_logprobs=batch.rollout_logprobs.to(device),
        mask=batch.mask.to(device),
    )


def dummy_row() -> Row:
    """The smallest row: a rank without work runs it so that collectives meet."""
    (row,) = pack([Sample((0,), (0,))], row_tokens=1)
    return row


@torch.no_grad()
def recompute(
    policy: Policy, share: Share, num_rows: int, temperature: float, device: torch.device
) -> Tensor:
    """log π of every token of a share under the present weights, [T]; no gradient.

    All ranks make the same `num_rows` passes, as in `backward`.
    """
    logprobs = torch.zeros(len(share.mask), device=device)
    for row in _padded(share.rows, num_rows):
        placed = DeviceRow.of(row or dummy_row(), device)
        out = policy(placed, temperature, lambda lp, _: lp.sum() * 0.0)
        if row is not None:
            logprobs[placed.flat] = out.logprobs
    return logprobs


def backward(
    policy: Policy,
    share: Share,
    num_rows: int,
    global_count: int,
    temperature: float,
    algorithm: AlgorithmSpec,
    device: torch.device,
) -> Recorded:
    """Adds a share's gradients to the policy's and records what its tokens did.

    The loss is the sum over this share divided by `global_count`, so that sums over
    shares and ranks are the batch's token mean.
    """
    recorded = Recorded.empty(len(share.mask), device)
    for i, row in enumerate(_padded(share.rows, num_rows)):
        last_backward(policy, i == num_rows - 1, device)
        placed = DeviceRow.of(row or dummy_row(), device)
        if row is None:
            out: HeadOutput = policy(placed, temperature, lambda lp, _: lp.sum() * 0.0)
        else:
            loss_of = _loss_of(share, placed.flat, global_count, algorithm, recorded)
            out = policy(placed, temperature, loss_of)
            recorded.logprobs[placed.flat] = out.logprobs
            recorded.entropy[placed.flat] = out.entropy
            recorded.loss += float(out.loss.detach())
        out.loss.backward()  # type: ignore[no-untyped-call]
    return recorded


class _loss_of:
    """The policy loss of one row's tokens, as the head asks for it chunk by chunk."""

    def __init__(
        self,
        share: Share,
        flat: Tensor,
        global_count: int,
        algorithm: AlgorithmSpec,
        recorded: Recorded,
    ) -> None:
        self.share = share
        self.flat = flat
        self.global_count = global_count
        self.algorithm = algorithm
        self.recorded = recorded

    def __call__(self, logprobs: Tensor, part: slice) -> Tensor:
        share, settings = self.share, self.algorithm.rollout_correction
        index = self.flat[part]
        mask = share.mask[index]
        now = logprobs.detach()
        old = now if share.old_logprobs is None else share.old_logprobs[index]
        # what a mask hides must not reach the gradient, not even as 0 * nan
        sampled = torch.where(mask, share.rollout_logprobs[index], now)
        chosen = correct(
            settings.type,
            old,
            sampled,
            tis_cap=settings.tis_cap,
            icepop_low=settings.icepop_low,
            icepop_high=settings.icepop_high,
        )
        policy_loss = ppo_clip(
            logprobs,
            chosen.proximal,
            share.advantages[index],
            clip_low=self.algorithm.clip_ratio_low,
            clip_high=self.algorithm.clip_ratio_high,
            dual_clip=self.algorithm.clip_ratio_c,
        )
        self.recorded.kept[index] = chosen.kept
        self.recorded.clipped[index] = policy_loss.clipped
        self.recorded.clipped_low[index] = policy_loss.clipped_low
        return token_mean(chosen.weights * policy_loss.loss, mask, self.global_count)


def sums_of(share: Share, recorded: Recorded) -> tuple[dict[str, float], float]:
    """The share's part of an update's metrics, and its largest difference of probabilities."""
    old = recorded.logprobs if share.old_logprobs is None else share.old_logprobs
    mask = share.mask
    sums = metrics.token_sums(recorded.logprobs, old, share.rollout_logprobs, recorded.kept, mask)
    sums |= metrics.sequence_sums(
        old,
        share.rollout_logprobs,
        mask,
        share.batch.sequence.to(mask.device),
        len(share.batch.samples),
    )
    sums["loss"] = recorded.loss
    sums["entropy"] = float(recorded.entropy[mask].double().sum())
    sums["clipped"] = float(recorded.clipped[mask].sum())
    sums["clipped_low"] = float(recorded.clipped_low[mask].sum())
    return sums, metrics.probs_diff_max(old, share.rollout_logprobs, mask)


def _padded(rows: Sequence[Row], count: int) -> list[Row | None]:
    return [*rows, *[None] * (count - len(rows))]
