"""The loss of a row's tokens, as the head asks for it chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.errors import InvalidSpec
from headway.jobspec import ActorSpec, AlgorithmSpec, CorrectionSpec
from headway.rl import losses, registry
from headway.rl.aggregate import aggregate
from headway.rl.corrections import Correction, correct, reject
from headway.rl.kl import kl
from headway.rl.losses import PolicyLoss
from headway.rl.packing import Row
from headway.rl.sequences import Sequences
from services.learner.batch import Batch


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised: policy loss + kl_loss_coef · KL - entropy_coeff · entropy."""

    algorithm: AlgorithmSpec
    actor: ActorSpec = field(default_factory=ActorSpec)

    @property
    def beyond_advantages(self) -> bool:
        """Whether completions without an advantage have a gradient too."""
        return self.actor.use_kl_loss or self.actor.entropy_coeff > 0


@dataclass(slots=True)
class Share:
    """A rank's share of a mini-batch on the device, with its rows packed."""

    batch: Batch
    rows: list[Row]
    advantages: Tensor  # [T]
    rollout_logprobs: Tensor  # [T]
    mask: Tensor  # bool [T]
    weights: Tensor | None = None  # [T] of tokens in the mean; None: all 1
    old_logprobs: Tensor | None = None  # [T] π_old when it is not the update's own π
    on_policy: bool = True  # π_old is π of the very pass that has the gradient
    correction: Correction | None = None  # [T] when it depends on whole completions
    ref_logprobs: Tensor | None = None  # [T] for the KL in the loss


@dataclass(slots=True)
class Recorded:
    """What an update's rows said, over all T tokens of a share; filled row by row."""

    logprobs: Tensor  # [T]
    entropy: Tensor  # [T]
    kept: Tensor  # bool [T]
    clipped: Tensor  # bool [T]
    clipped_low: Tensor  # bool [T]
    loss: float = 0.0
    kl_loss: float = 0.0  # without its coefficient

    @staticmethod
    def empty(count: int, device: torch.device) -> Recorded:
        """Zeros and falses."""
        zeros = torch.zeros(count, device=device)
        no = torch.zeros(count, dtype=torch.bool, device=device)
        return Recorded(zeros, zeros.clone(), no, no.clone(), no.clone())


def correction_of(
    settings: CorrectionSpec, old: Tensor, sampled: Tensor, sequences: Sequences | None = None
) -> Correction:
    """The job's correction and rejection of tokens, [T]; `sequences` where they are whole."""
    chosen = correct(
        settings.type,
        old,
        sampled,
        tis_cap=settings.tis_cap,
        icepop_low=settings.icepop_low,
        icepop_high=settings.icepop_high,
        proximal=settings.proximal,
        alpha=settings.proximal_alpha,
        sequences=sequences if settings.level == "sequence" else None,
    )
    if settings.rollout_rs is None:
        return chosen
    low, high = settings.rejection_bounds
    kept = reject(
        settings.rollout_rs, chosen.proximal, sampled, high=high, low=low, sequences=sequences
    )
    weights = torch.where(kept, chosen.weights, torch.zeros_like(chosen.weights))
    return Correction(chosen.proximal, weights, chosen.kept & kept)


def policy_loss(
    algorithm: AlgorithmSpec, logprobs: Tensor, proximal: Tensor, advantages: Tensor, ratio: Tensor
) -> PolicyLoss:
    """The job's policy loss, all [T]; `ratio` is the log-ratio of whole completions."""
    clip = {"clip_low": algorithm.clip_ratio_low, "clip_high": algorithm.clip_ratio_high}
    match algorithm.policy_loss:
        case "ppo_clip":
            dual = algorithm.clip_ratio_c
            return losses.ppo_clip(logprobs, proximal, advantages, dual_clip=dual, **clip)
        case "gspo":
            return losses.gspo(logprobs, ratio, advantages, **clip)
        case "gmpo":
            return losses.gmpo(logprobs, proximal, ratio, advantages, **clip)
        case "cispo":
            return losses.cispo(logprobs, proximal, advantages, **clip)
        case "sapo":
            taus = {"tau_pos": algorithm.tau_pos, "tau_neg": algorithm.tau_neg}
            return losses.sapo(logprobs, proximal, advantages, **taus)
        case "gpg" | "reinforce":
            return losses.reinforce(logprobs, advantages)
        case name:
            found = registry.policy_losses.get(name)(logprobs, proximal, advantages)
            if found.loss.shape != logprobs.shape:
                raise InvalidSpec(
                    f"algorithm.policy_loss {name} gives {tuple(found.loss.shape)} for"
                    f" {len(logprobs)} tokens: one number a token is wanted"
                )
            return found


def sequence_log_ratio(
    objective: Objective, share: Share, flat: Tensor, logprobs: Tensor
) -> Tensor:
    """The mean log-ratio of the completion of each of a row's tokens, [T of the row].

    `logprobs` are π's of the row, without gradient; a row holds whole completions.
    """
    algorithm, mask = objective.algorithm, share.mask[flat]
    old = logprobs if share.old_logprobs is None else share.old_logprobs[flat]
    sampled = torch.where(mask, share.rollout_logprobs[flat], logprobs)
    if not share.on_policy:
        old = correct(
            algorithm.rollout_correction.type,
            old,
            sampled,
            proximal=algorithm.rollout_correction.proximal,
            alpha=algorithm.rollout_correction.proximal_alpha,
        ).proximal
    ratio = logprobs - old
    if algorithm.policy_loss == "gmpo":
        clip = {"clip_low": algorithm.clip_ratio_low, "clip_high": algorithm.clip_ratio_high}
        ratio, _ = losses.gmpo_log_ratio(logprobs, old, share.advantages[flat], **clip)
    index = share.batch.sequence.to(flat.device)[flat]
    sequences = Sequences(mask, index, len(share.batch.samples))
    return sequences.spread(sequences.mean(ratio))


class RowLoss:
    """The loss of one row's tokens."""

    def __init__(
        self,
        share: Share,
        flat: Tensor,
        denominator: float,
        objective: Objective,
        recorded: Recorded,
        log_ratio: Tensor | None,
    ) -> None:
        """`log_ratio` [T of the row] is `sequence_log_ratio`; None: it is zero or not needed."""
        self.share = share
        self.flat = flat
        self.denominator = denominator
        self.objective = objective
        self.recorded = recorded
        self.log_ratio = log_ratio

    def __call__(self, logprobs: Tensor, part: slice) -> Tensor:
        """The summed loss of some of the row's tokens; see `head.LossOf`."""
        share, algorithm, actor = self.share, self.objective.algorithm, self.objective.actor
        index = self.flat[part]
        mask = share.mask[index]
        now = logprobs.detach()
        old = now if share.on_policy or share.old_logprobs is None else share.old_logprobs[index]
        if share.correction is None:
            # what a mask hides must not reach the gradient, not even as 0 * nan
            sampled = torch.where(mask, share.rollout_logprobs[index], now)
            chosen = correction_of(algorithm.rollout_correction, old, sampled)
        else:
            whole = share.correction
            chosen = Correction(old, whole.weights[index], whole.kept[index])
        ratio = torch.zeros_like(now) if self.log_ratio is None else self.log_ratio[part]
        found = policy_loss(algorithm, logprobs, chosen.proximal, share.advantages[index], ratio)
        self.recorded.kept[index] = chosen.kept
        self.recorded.clipped[index] = found.clipped
        self.recorded.clipped_low[index] = found.clipped_low
        weights = None if share.weights is None else share.weights[index]
        loss = aggregate(chosen.weights * found.loss, mask, weights, self.denominator)
        if share.ref_logprobs is None:
            return loss
        distance = kl(actor.kl_loss_type, logprobs, share.ref_logprobs[index])
        kl_loss = aggregate(distance, mask, weights, self.denominator)
        self.recorded.kl_loss += float(kl_loss.detach())
        return loss + actor.kl_loss_coef * kl_loss

    def entropy_weights(self) -> Tensor | None:
        """What each token's entropy is multiplied with in the loss, [T of the row]; None: 0."""
        share, coefficient = self.share, self.objective.actor.entropy_coeff
        if coefficient == 0:
            return None
        weights = share.mask[self.flat] * (coefficient / self.denominator)
        return weights if share.weights is None else weights * share.weights[self.flat]
