"""From groups to the tensors of an update: labels first, advantages between, a batch last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import LedgerViolation
from headway.messages import Completion, Group
from headway.rl.advantages import varied
from headway.rl.corrections import lag_mask
from headway.rl.packing import Sample
from headway.rl.sequences import Sequences


@dataclass(frozen=True, slots=True)
class Labelled:
    """A group with the rewards and masks of its n completions at a step."""

    group: Group
    graded: Tensor  # bool [n]: has a reward
    rewards: Tensor  # float64 [n], penalties taken off; 0 where not graded
    masks: tuple[Tensor, ...]  # n of bool [tokens]: may be trained on; empty where not graded
    baseline: float | None = None  # reward of the greedy completion, penalties taken off

    def lengths(self) -> Tensor:
        """Tokens that may be trained on, int64 [n]."""
        return torch.tensor([int(mask.sum()) for mask in self.masks])


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantages of a group's n completions."""

    completions: Tensor  # float64 [n]; of `tokens` their means
    tokens: tuple[Tensor, ...] | None = None  # n of float64 [tokens] where they differ by token

    def of_token(self, index: int, length: int) -> Tensor:
        """Of each token of a completion, float64 [length]."""
        if self.tokens is not None:
            return self.tokens[index]
        return self.completions[index].expand(length)


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a mini-batch. T: tokens of the completions that run."""

    samples: list[Sample]  # completions of groups with a gradient
    owners: list[tuple[int, int]]  # of each sample: its group and its place there
    advantages: Tensor  # float32 [T]
    rollout_logprobs: Tensor  # float32 [T]
    mask: Tensor  # bool [T]: may be trained on
    sequence: Tensor  # int64 [T]: index into samples
    num_tokens: int  # unmasked tokens of all groups: this rank's part of the denominator
    num_sequences: int  # completions of all groups with such a token, likewise
    num_late: int  # tokens masked for their lag
    num_groups: int
    num_flat: int  # groups whose rewards are all equal
    completion_advantages: Tensor  # float64 [completions with a reward], of all groups

    def sequences(self, device: torch.device) -> Sequences:
        """Which token belongs to which sample."""
        return Sequences(self.mask.to(device), self.sequence.to(device), len(self.samples))


def share(ids: Sequence[int], rank: int, world: int, mini: int) -> list[int]:
    """The ids whose payloads a rank needs: of each mini-batch of `mini`, every world-th.

    The order is the batch's; a rank trains its i-th mini-batch on the i-th
    `mini / world` of them.
    """
    return [
        ticket_id
        for start in range(0, len(ids), mini)
        for ticket_id in ids[start : start + mini][rank::world]
    ]


def label(
    groups: Sequence[Group],
    step: int,
    late: frozenset[int],
    max_policy_lag: int,
    penalty: Callable[[Tensor], Tensor] | None = None,
) -> list[Labelled]:
    """Rewards and masks of some groups at `step`.

    A completion without a reward is left out, of its group's statistics too. Tokens of
    `late` groups that lag too much are masked out of numerator and denominator; in any
    other group they are a LedgerViolation, as is a token without a version. `penalty`
    maps tokens int [n] of the completions to what is added to their rewards.
    """
    labelled = []
    for group in groups:
        graded = torch.tensor([c.reward is not None for c in group.completions])
        rewards = torch.tensor(
            [0.0 if c.reward is None else c.reward for c in group.completions],
            dtype=torch.float64,
        )
        if penalty is not None:
            tokens = torch.tensor([len(c.token_ids) for c in group.completions])
            rewards = torch.where(graded, rewards + penalty(tokens), rewards)
        masks = tuple(
            torch.zeros(len(completion.token_ids), dtype=torch.bool)
            if completion.reward is None
            else _lag_mask(completion, group, step, late, max_policy_lag)
            for completion in group.completions
        )
        baseline = None if group.baseline is None else group.baseline.reward
        if baseline is not None and group.baseline is not None and penalty is not None:
            baseline += float(penalty(torch.tensor(group.baseline.num_tokens)))
        labelled.append(Labelled(group, graded, rewards, masks, baseline))
    return labelled


def make_batch(
    labelled: Sequence[Labelled], credits: Sequence[Credit], *, run_all: bool = False
) -> Batch:
    """The tensors of some groups and their advantages.

    A group whose advantages are all zero has no gradient: it counts in the denominators and
    does not run, unless `run_all` says that the loss has other terms.
    """
    owners: list[tuple[int, int]] = []
    scores: list[Tensor] = []
    flat = [not bool(varied(g.rewards[None], g.graded[None])) for g in labelled]
    for i, (item, credit) in enumerate(zip(labelled, credits, strict=True)):
        scores.append(credit.completions[item.graded])
        if run_all or _has_gradient(item, credit):
            owners += [(i, j) for j, mask in enumerate(item.masks) if mask.any()]
    chosen = [labelled[i].group.completions[j] for i, j in owners]
    lengths = torch.tensor([len(c.token_ids) for c in chosen], dtype=torch.int64)
    advantages = [
        credits[i].of_token(j, len(c.token_ids)).float()
        for (i, j), c in zip(owners, chosen, strict=True)
    ]
    masks = [labelled[i].masks[j] for i, j in owners]
    prompts = [labelled[i].group.ticket.prompt_ids for i, _ in owners]
    return Batch(
        samples=[Sample(p, c.token_ids) for p, c in zip(prompts, chosen, strict=True)],
        owners=owners,
        advantages=torch.cat(advantages) if owners else torch.zeros(0),
        rollout_logprobs=torch.tensor(
            [value for c in chosen for value in c.logprobs], dtype=torch.float32
        ),
        mask=torch.cat(masks) if owners else torch.zeros(0, dtype=torch.bool),
        sequence=torch.arange(len(owners)).repeat_interleave(lengths),
        num_tokens=sum(int(mask.sum()) for g in labelled for mask in g.masks),
        num_sequences=sum(bool(mask.any()) for g in labelled for mask in g.masks),
        num_late=sum(
            int((~mask).sum())
            for g in labelled
            for mask, graded in zip(g.masks, g.graded.tolist(), strict=True)
            if graded
        ),
        num_groups=len(labelled),
        num_flat=sum(flat),
        completion_advantages=torch.cat(scores) if scores else torch.zeros(0, dtype=torch.float64),
    )


def _has_gradient(item: Labelled, credit: Credit) -> bool:
    if credit.tokens is None:
        return bool((credit.completions[item.graded] != 0).any())  # true for a NaN
    return any(
        bool((tokens[mask] != 0).any())
        for tokens, mask in zip(credit.tokens, item.masks, strict=True)
    )


def _lag_mask(
    completion: Completion, group: Group, step: int, late: frozenset[int], max_policy_lag: int
) -> Tensor:
    mask = lag_mask(versions(completion, group), step, max_policy_lag)
    if not mask.all() and group.ticket.ticket_id not in late:
        raise LedgerViolation(
            f"ticket {group.ticket.ticket_id} has tokens that lag more than"
            f" {max_policy_lag} versions at step {step}"
        )
    return mask


def versions(completion: Completion, group: Group) -> Tensor:
    """The version that sampled each token, int64 [T]. LedgerViolation where one is missing."""
    made: list[int] = []
    for span in completion.spans:
        if span.start != len(made):
            break
        made += [span.version] * (span.end - span.start)
    length = len(completion.token_ids)
    if len(made) != length or len(completion.logprobs) != length:
        raise LedgerViolation(
            f"ticket {group.ticket.ticket_id} from {group.node_id}: a completion of {length}"
            f" tokens has versions for {len(made)} and log-probs for {len(completion.logprobs)}"
        )
    return torch.tensor(made, dtype=torch.int64)
