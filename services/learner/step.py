"""One optimiser update's forward and backward passes: tensors in, gradients and sums out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.jobspec import ActorSpec, CorrectionSpec
from headway.rl import metrics
from headway.rl.aggregate import token_weights
from headway.rl.names import Aggregation
from headway.rl.packing import Row, Sample, pack
from headway.row_budget import row_budget
from services.learner.batch import Batch
from services.learner.model import DeviceRow, RunsRows
from services.learner.objective import (
    Objective,
    Recorded,
    RowLoss,
    Share,
    correction_of,
    sequence_log_ratio,
)
from services.learner.sharding import last_backward


def make_share(
    batch: Batch,
    device: torch.device,
    row_tokens: int | None = None,
    mode: Aggregation = "token-mean",
) -> Share:
    """Packs a batch, groups side by side, and moves it to the device.

    A row has at most `row_tokens` input tokens, by default the device's `row_budget`.
    """
    budget = row_budget(row_tokens, on_gpu=device.type != "cpu")
    return Share(
        batch=batch,
        rows=pack(batch.samples, budget),
        advantages=batch.advantages.to(device),
        rollout_logprobs=batch.rollout_logprobs.to(device),
        mask=batch.mask.to(device),
        weights=token_weights(mode, batch.sequences(device)),
    )


def dummy_row() -> Row:
    """The smallest row: a rank without work runs it so that collectives meet."""
    (row,) = pack([Sample((0,), (0,))], row_tokens=1)
    return row


def padded(rows: Sequence[Row], count: int) -> list[Row | None]:
    """The rows of one rank and as many empty ones (None) as make `count` passes."""
    return [*rows, *[None] * (count - len(rows))]


@torch.no_grad()
def recompute(
    policy: RunsRows, share: Share, num_rows: int, temperature: float, device: torch.device
) -> Tensor:
    """log π of every token of a share under the present weights, [T]; no gradient.

    All ranks make the same `num_rows` passes, as in `backward`.
    """
    logprobs = torch.zeros(len(share.mask), device=device)
    for row in padded(share.rows, num_rows):
        placed = DeviceRow.of(row or dummy_row(), device)
        found = row_logprobs(policy, placed, temperature)
        if row is not None:
            logprobs[placed.flat] = found
    return logprobs


@torch.no_grad()
def row_logprobs(policy: RunsRows, row: DeviceRow, temperature: float) -> Tensor:
    """log π of a row's tokens, [T of the row]; no gradient."""
    return policy(row, temperature, _nothing).logprobs


def correct_whole(share: Share, settings: CorrectionSpec, device: torch.device) -> None:
    """Makes the correction of a share whose π_old is known, where it depends on completions."""
    assert share.old_logprobs is not None
    sampled = torch.where(share.mask, share.rollout_logprobs, share.old_logprobs)
    sequences = share.batch.sequences(device)
    share.correction = correction_of(settings, share.old_logprobs, sampled, sequences)


def backward(
    policy: RunsRows,
    share: Share,
    num_rows: int,
    denominator: float,
    temperature: float,
    objective: Objective,
    device: torch.device,
) -> Recorded:
    """Adds a share's gradients to the policy's and records what its tokens did.

    The loss is the weighted sum over this share divided by the global `denominator`
    (`headway.rl.aggregate`), so that sums over shares and ranks are the batch's.
    """
    recorded = Recorded.empty(len(share.mask), device)
    # where π_old is not this very pass, a ratio of completions needs π of all their tokens first
    ahead = objective.algorithm.sequence_ratio and not share.on_policy
    for i, row in enumerate(padded(share.rows, num_rows)):
        placed = DeviceRow.of(row or dummy_row(), device)
        before = row_logprobs(policy, placed, temperature) if ahead else None
        last_backward(policy, i == num_rows - 1, device)
        if row is None:
            policy(placed, temperature, _nothing).loss.backward()  # type: ignore[no-untyped-call]
            continue
        ratio = (
            None if before is None else sequence_log_ratio(objective, share, placed.flat, before)
        )
        loss_of = RowLoss(share, placed.flat, denominator, objective, recorded, ratio)
        out = policy(placed, temperature, loss_of, loss_of.entropy_weights())
        recorded.logprobs[placed.flat] = out.logprobs
        recorded.entropy[placed.flat] = out.entropy
        recorded.loss += float(out.loss.detach())
        out.loss.backward()  # type: ignore[no-untyped-call]
    return recorded


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
    sums["kl_loss"] = recorded.kl_loss
    sums["entropy"] = float(recorded.entropy[mask].double().sum())
    weighted = recorded.entropy if share.weights is None else recorded.entropy * share.weights
    sums["weighted_entropy"] = float(weighted[mask].double().sum())
    sums["clipped"] = float(recorded.clipped[mask].sum())
    sums["clipped_low"] = float(recorded.clipped_low[mask].sum())
    return sums, metrics.probs_diff_max(old, share.rollout_logprobs, mask)


def loss_stats(sums: dict[str, float], divisor: float, actor: ActorSpec) -> dict[str, float]:
    """The policy loss, and the loss's other terms where there are any, from added sums."""
    stats = {"actor/pg_loss": sums["loss"]}
    if actor.use_kl_loss:
        stats["actor/kl_loss"] = sums["kl_loss"]
        stats["actor/kl_coef"] = actor.kl_loss_coef
        stats["actor/pg_loss"] -= actor.kl_loss_coef * sums["kl_loss"]
    if actor.entropy_coeff > 0:
        stats["actor/pg_loss"] += actor.entropy_coeff * sums["weighted_entropy"] / divisor
    return stats


def _nothing(logprobs: Tensor, part: slice) -> Tensor:
    return logprobs.sum() * 0.0
