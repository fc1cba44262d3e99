"""From groups to the tensors of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import LedgerViolation
from headway.jobspec import AlgorithmSpec
from headway.messages import Completion, Group
from headway.rl.advantages import grpo, varied
from headway.rl.corrections import lag_mask
from headway.rl.packing import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a mini-batch. T: tokens of the completions that run."""

    samples: list[Sample]  # completions of groups with a gradient
    advantages: Tensor  # float32 [T]
    rollout_logprobs: Tensor  # float32 [T]
    mask: Tensor  # bool [T]: may be trained on
    sequence: Tensor  # int64 [T]: index into samples
    num_tokens: int  # unmasked tokens of all groups: this rank's part of the denominator
    num_late: int  # tokens masked for their lag
    num_groups: int
    num_flat: int  # groups without a gradient, not run
    completion_advantages: Tensor  # float64 [completions with a reward], of all groups


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


def make_batch(
    groups: Sequence[Group], step: int, late: frozenset[int], algorithm: AlgorithmSpec
) -> Batch:
    """Advantages and masks of some groups at `step`.

    A completion without a reward is left out, of its group's statistics too. Tokens of
    `late` groups that lag too much are masked out of numerator and denominator; in any
    other group they are a LedgerViolation, as is a token without a version. Groups whose
    rewards are all equal have no gradient: they count in the denominator and do not run.
    """
    parts: list[tuple[Completion, Group, float, Tensor]] = []
    scores: list[Tensor] = []
    num_tokens = num_late = num_flat = 0
    for group in groups:
        graded = torch.tensor([[c.reward is not None for c in group.completions]])
        rewards = torch.tensor(
            [[0.0 if c.reward is None else c.reward for c in group.completions]],
            dtype=torch.float64,
        )
        advantages = grpo(rewards, graded, norm_by_std=algorithm.norm_adv_by_std_in_grpo)[0]
        scores.append(advantages[graded[0]])
        runs = bool(varied(rewards, graded)[0])
        num_flat += not runs
        for completion, advantage in zip(group.completions, advantages.tolist(), strict=True):
            if completion.reward is None:
                continue
            mask = lag_mask(versions(completion, group), step, algorithm.max_policy_lag)
            if not mask.all() and group.ticket.ticket_id not in late:
                raise LedgerViolation(
                    f"ticket {group.ticket.ticket_id} has tokens that lag more than"
                    f" {algorithm.max_policy_lag} versions at step {step}"
                )
            num_tokens += int(mask.sum())
            num_late += int((~mask).sum())
            if runs and mask.any():
                parts.append((completion, group, advantage, mask))
    lengths = torch.tensor([len(c.token_ids) for c, *_ in parts], dtype=torch.int64)
    logprobs = [value for c, *_ in parts for value in c.logprobs]
    each = torch.tensor([a for _, _, a, _ in parts], dtype=torch.float32)
    return Batch(
        samples=[Sample(g.ticket.prompt_ids, c.token_ids) for c, g, *_ in parts],
        advantages=each.repeat_interleave(lengths),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        mask=torch.cat([m for *_, m in parts]) if parts else torch.zeros(0, dtype=torch.bool),
        sequence=torch.arange(len(parts)).repeat_interleave(lengths),
        num_tokens=num_tokens,
        num_late=num_late,
        num_groups=len(groups),
        num_flat=num_flat,
        completion_advantages=torch.cat(scores) if scores else torch.zeros(0, dtype=torch.float64),
    )


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
