"""A whole training step's objective written out plainly: padded batch, token after token.

log π comes from `padded_logprobs` (whole logits, the model's own attention); everything after
it is scalar arithmetic from the formulas, with advantages from `rl_reference`. Stopped
gradients are detached scalars. Sequence losses have their published form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.jobspec import JobSpec
from headway.messages import Completion, Group
from tests.support import rl_reference as ref
from tests.support.learning import padded_logprobs


@dataclass
class Plain:
    """An objective and its parts."""

    loss: Tensor
    pg_loss: float
    kl_loss: float
    logprobs: Tensor  # [T] of all graded completions


def plain_step(
    lm: torch.nn.Module,
    groups: Sequence[Group],
    spec: JobSpec,
    *,
    old: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    costs: list[list[float]] | None = None,
) -> Plain:
    """The objective of one update on all groups; every completion is graded and unmasked.

    `old` is log π_old (default: π itself), `ref_logprobs` the reference's, both [T].
    `costs` come off the reward of each token of each completion.
    """
    made = [(g, c) for g in groups for c in g.completions]
    pairs = [(g.ticket.prompt_ids, c.token_ids) for g, c in made]
    lp = padded_logprobs(lm, pairs)
    old = lp.detach() if old is None else old
    sizes = [len(c.token_ids) for _, c in made]
    advantages = credit(groups, spec, costs)
    rows = zip(lp.split(sizes), old.split(sizes), [c for _, c in made], advantages, strict=True)
    terms = [sequence_terms(spec, *row) for row in rows]
    loss = mean(spec, terms)
    pg, kl_loss = float(loss.detach()), 0.0
    if ref_logprobs is not None:
        form = spec.actor.kl_loss_type
        distances = [kl(form, x, y) for x, y in zip(lp, ref_logprobs, strict=True)]
        total = mean(spec, list(torch.stack(distances).split(sizes)))
        kl_loss = float(total.detach())
        loss = loss + spec.actor.kl_loss_coef * total
    return Plain(loss, pg, kl_loss, lp.detach())


def credit(
    groups: Sequence[Group], spec: JobSpec, costs: list[list[float]] | None = None
) -> list[list[float]]:
    """The advantage of each token of each completion."""
    name, at, values = spec.algorithm.adv_estimator, 0, []
    overlong, limit = spec.reward.overlong_buffer, spec.rollout.max_tokens
    for g in groups:
        rewards = []
        lengths = [len(c.token_ids) for c in g.completions]
        off = [[0.0] * n for n in lengths] if costs is None else costs[at : at + len(lengths)]
        at += len(lengths)
        for c, n in zip(g.completions, lengths, strict=True):
            assert c.reward is not None
            more = ref.overlong(n, limit, overlong.len) if overlong.enable else 0.0
            rewards.append(c.reward + more)
        if name == "reinforce_plus_plus":
            for r, cost, n in zip(rewards, off, lengths, strict=True):
                tokens = [-x for x in cost]
                tokens[-1] += r
                values.append(ref.returns(tokens, [True] * n, spec.algorithm.gamma))
            continue
        rewards = [r - math.fsum(cost) for r, cost in zip(rewards, off, strict=True)]
        a = ref.group_advantages(name, list(rewards), lengths)
        values += [[x] * n for x, n in zip(a, lengths, strict=True)]
    if name.startswith("reinforce_plus_plus"):
        values = ref.whiten(values, [[True] * len(v) for v in values])
    return values


def sequence_terms(
    spec: JobSpec, lp: Tensor, old: Tensor, completion: Completion, advantages: list[float]
) -> Tensor:
    """The loss of each token of one completion, weighted by its correction."""
    algorithm = spec.algorithm
    settings, name = algorithm.rollout_correction, algorithm.policy_loss
    mu, every = list(completion.logprobs), [True] * len(lp)
    prox = old
    if settings.proximal == "bypass":
        prox = torch.tensor(mu)
    elif settings.proximal == "log_linear":
        alpha = settings.proximal_alpha
        prox = torch.tensor(mu) + alpha * (lp.detach() - torch.tensor(mu))
    p = prox.tolist()
    weights = ref.correction(settings.type, p, mu, every, sequence=settings.level == "sequence")
    if settings.rollout_rs is not None:
        kept = ref.keeps(settings.rollout_rs, p, mu, every, *settings.rejection_bounds)
        weights = [w if k else 0.0 for w, k in zip(weights, kept, strict=True)]
    w = torch.tensor(weights)
    if name in ("gspo", "gmpo"):
        # the published objective has one weight a completion: with token weights its
        # gradient falls on each token by its own
        whole = _sequence_loss(spec, lp, prox, sum(advantages) / len(advantages))
        if len(set(weights)) == 1:
            return w * whole.expand(len(lp))
        slopes = torch.autograd.grad(whole, lp, retain_graph=True)[0] * len(lp)
        return w * (whole.detach() + slopes * (lp - lp.detach()))
    losses = [
        _token_loss(spec, x, q, a) for x, q, a in zip(lp, prox.tolist(), advantages, strict=True)
    ]
    return w * torch.stack(losses)


def _token_loss(spec: JobSpec, x: Tensor, old: float, a: float) -> Tensor:
    algorithm = spec.algorithm
    low, high = algorithm.clip_ratio_low, algorithm.clip_ratio_high
    r = torch.exp((x - old).clamp(-20, 20))
    if algorithm.policy_loss == "ppo_clip":
        loss = torch.maximum(-r * a, -r.clamp(1 - low, 1 + high) * a)
        dual = algorithm.clip_ratio_c
        return loss.clamp(max=-dual * a) if dual is not None and a < 0 else loss
    if algorithm.policy_loss == "cispo":
        return -float(r.detach().clamp(1 - low, 1 + high)) * a * x
    if algorithm.policy_loss == "sapo":
        tau = algorithm.tau_pos if a > 0 else algorithm.tau_neg
        return -(4 / tau) * a / (1 + torch.exp(-tau * (r - 1)))
    return -a * x


def _sequence_loss(spec: JobSpec, lp: Tensor, old: Tensor, a: float) -> Tensor:
    algorithm = spec.algorithm
    low, high = algorithm.clip_ratio_low, algorithm.clip_ratio_high
    if algorithm.policy_loss == "gspo":
        s = torch.exp((lp - old).mean().clamp(max=10))
        return torch.maximum(-s * a, -s.clamp(1 - low, 1 + high) * a)
    logs = (lp - old).clamp(-20, 20)
    return -a * torch.exp((logs.clamp(max=high) if a > 0 else logs.clamp(min=-low)).mean())


def kl(form: str, x: Tensor, y: Tensor) -> Tensor:
    """One token's distance."""
    d = (x - y).clamp(-20, 20)
    if form == "k3":
        return (torch.exp(-d) - 1 + d).clamp(-10, 10)
    return {"k1": d, "k2": d * d / 2, "abs": d.abs()}[form]


def mean(spec: JobSpec, terms: Sequence[Tensor]) -> Tensor:
    """One number from the tokens of all completions, which all have tokens."""
    mode, n = spec.algorithm.loss_agg_mode, len(terms)
    every = torch.cat(list(terms))
    if mode == "token-mean":
        return every.mean()
    if mode == "seq-mean-token-mean":
        return torch.stack([t.mean() for t in terms]).mean()
    factor = spec.algorithm.loss_scale_factor or 1
    return every.sum() / {"token-sum": 1, "seq-mean-token-sum": n}.get(mode, n * factor)
