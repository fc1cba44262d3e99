"""The trainer on one rank: its step against a plain reference, masks, skips.

Reference: right-padded batch, whole logits, the model's own attention; float32.
Losses agree to 1e-5 and weights after an Adam step to 1e-4 of the learning rate's reach.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headway.errors import LedgerViolation
from headway.messages import Group, VersionSpan
from services.learner.batch import share
from services.learner.sharding import compute_dtype
from tests.support.learning import batch_of, completion, group, padded_logprobs, random_groups
from tests.support.tiny_model import build_tiny_model
from tests.support.trainers import CPU, same, trainer, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


def reference_loss(
    lm, groups: list[Group], kind: str, old: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The batch's loss written out token by token, and log π; `old` is π_old, else π itself."""
    pairs = [(g.ticket.prompt_ids, c.token_ids) for g in groups for c in g.completions]
    lp = padded_logprobs(lm, pairs)
    old = lp.detach() if old is None else old
    total, at = torch.zeros(()), 0
    for g in groups:
        rewards = torch.tensor([c.reward for c in g.completions], dtype=torch.float64)
        spread = rewards.std() if len(set(rewards.tolist())) > 1 else torch.tensor(1.0)
        for c, a in zip(g.completions, (rewards - rewards.mean()) / (spread + 1e-6), strict=True):
            for mu in c.logprobs:
                w, advantage = math.exp(float(old[at]) - mu), float(a)
                weight = {
                    "none": 1.0,
                    "tis": min(w, 2.0),
                    "icepop": w if 0.5 <= w <= 5.0 else 0.0,
                    "decoupled": w,
                }[kind]
                r = torch.exp(lp[at] - (mu if kind == "none" else old[at]))
                loss = torch.maximum(-r * advantage, -r.clamp(0.8, 1.2) * advantage)
                if advantage < 0:
                    loss = loss.clamp(max=-3.0 * advantage)
                total = total + weight * loss
                at += 1
    return total / at, lp.detach()


@pytest.mark.parametrize("kind", ["none", "tis", "icepop", "decoupled"])
def test_step_equals_a_plain_padded_step(model, kind):
    groups = random_groups(4, 4, seed=5, equal=[2])
    t = trainer(model, algorithm__rollout_correction__type=kind, actor__optim__grad_clip=0.05)
    stats = t.train_step(0, groups)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2, weight_decay=0.0)
    loss, _ = reference_loss(lm, groups, kind)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.05)
    optimizer.step()
    assert stats["actor/pg_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert stats["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert stats["actor/skipped"] == 0.0
    assert stats["training/zero_variance_ratio"] == 0.25
    # Adam's first step is lr · g/(|g| + eps) for any g, so only entries with |g| >> eps compare
    for name, parameter in lm.named_parameters():
        clear = parameter.grad.abs() > 1e-6
        gap = (weights(t)[name] - parameter.detach()).abs()[clear]
        assert clear.any() and float(gap.max()) < 1e-4


def test_rows_and_order_do_not_change_the_step(model):
    groups = random_groups(4, 4, seed=6)
    # π_old is μ here: losses, not only gradients, depend on every token
    whole = trainer(model, algorithm__rollout_correction__type="none")
    a = whole.train_step(0, groups)
    cut = trainer(
        model,
        algorithm__rollout_correction__type="none",
        actor__ppo_max_token_len_per_gpu=20,
        data__max_prompt_length=10,
        rollout__max_tokens=10,
    )
    b = cut.train_step(0, groups[::-1])
    work = {"training/packed_tokens", "perf/model_tflop"}
    assert all(b[name] > a[name] for name in work)  # prefixes were repeated
    for name in a.keys() - work:
        assert b[name] == pytest.approx(a[name], abs=1e-5), name


def test_groups_without_variance_do_not_run_but_count(model):
    groups = random_groups(2, 4, seed=7, equal=[1])
    both = trainer(model).train_step(0, groups)
    alone = trainer(model).train_step(0, groups[:1])
    tokens = [sum(len(c.token_ids) for c in g.completions) for g in groups]
    assert both["training/packed_tokens"] == alone["training/packed_tokens"]
    assert both["training/num_tokens"] == sum(tokens)
    factor = tokens[0] / sum(tokens)
    assert both["actor/pg_loss"] == pytest.approx(alone["actor/pg_loss"] * factor, rel=1e-5)
    assert both["actor/grad_norm"] == pytest.approx(alone["actor/grad_norm"] * factor, rel=1e-5)
    assert both["actor/entropy"] == pytest.approx(alone["actor/entropy"], rel=1e-6)


def test_a_batch_without_variance_leaves_fresh_weights_alone(model):
    t = trainer(model)
    before = weights(t)
    stats = t.train_step(0, random_groups(4, 4, equal=range(4)))
    assert same(before, weights(t))
    assert stats["actor/grad_norm"] == stats["actor/pg_loss"] == stats["actor/skipped"] == 0.0
    assert all(math.isfinite(value) for value in stats.values())


def test_one_token_and_empty_completions(model):
    answers = [completion([5], 1.0), completion([], 0.0), completion([7], 0.5)]
    stats = trainer(model).train_step(0, [group(0, [1, 2, 3], answers)])
    assert stats["training/num_tokens"] == 2
    assert stats["training/packed_tokens"] == 3  # only the prompt: one-token answers add no input
    assert stats["actor/grad_norm"] > 0
    assert stats["critic/advantages/min"] == pytest.approx(-1.0, abs=1e-5)


def test_masked_fillers_leave_the_gradient_alone_s059(model):
    """Half the tokens too old and masked: the kept part's gradient is as if alone."""
    kept = [completion([5, 6, 7], 1.0), completion([8, 9], 0.0)]
    old = [completion([4, 4, 4], 1.0, versions=[0] * 3), completion([3, 3], 0.0, versions=[0] * 2)]
    fresh = [replace(c, spans=(VersionSpan(5, 0, len(c.token_ids)),)) for c in kept]
    plain = trainer(model).train_step(5, [group(0, [1, 2], fresh)])
    mixed = trainer(model).train_step(
        5, [group(0, [1, 2], fresh), group(1, [1, 2], old)], late=frozenset({1})
    )
    assert mixed["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-5)
    assert mixed["actor/pg_loss"] == pytest.approx(plain["actor/pg_loss"], abs=1e-6)
    assert (mixed["training/num_tokens"], mixed["training/late_tokens"]) == (5, 5)


def test_late_masks_have_holes_s003(model):
    # eta 2, step 4: tokens of versions 0 and 1 are out, in the middle of a completion too
    late = [completion([5, 6, 7], 1.0, versions=[3, 1, 2]), completion([8], 0.0, versions=[0])]
    batch = batch_of([group(9, [1], late)], 4, [9])
    assert batch.mask.tolist() == [True, False, True]  # the wholly masked completion does not run
    assert (batch.num_tokens, batch.num_late) == (2, 2)
    stats = trainer(model).train_step(4, [group(9, [1], late)], late=frozenset({9}))
    assert stats["actor/grad_norm"] > 0


def test_a_masked_token_s_nan_is_nobody_s_business_s083(model):
    nan = float("nan")
    late = [
        completion([5, 6], 1.0, versions=[0, 4], logprobs=[nan, -2.0]),
        completion([8], 0.0, versions=[4]),
    ]
    stats = trainer(model).train_step(4, [group(9, [1], late)], late=frozenset({9}))
    assert stats["actor/skipped"] == 0.0 and stats["actor/grad_norm"] > 0


def test_too_old_tokens_are_never_trained_unasked(model):
    old = group(3, [1], [completion([5], 1.0), completion([6], 0.0)])
    with pytest.raises(LedgerViolation, match="ticket 3 has tokens that lag more than 2"):
        trainer(model).train_step(3, [old])
    trainer(model).train_step(2, [old])


def test_a_missing_version_is_an_error_never_zero_lag(model):
    broken = replace(completion([5, 6], 1.0), spans=(VersionSpan(0, 0, 1),))
    with pytest.raises(LedgerViolation, match="2 tokens has versions for 1"):
        trainer(model).train_step(0, [group(3, [1], [broken, completion([6], 0.0)])])


def test_survivors_of_failed_graders_s055(model):
    """Four completions, three without a reward: the survivor is dropped, nothing is NaN."""
    answers = [completion([5, 6], 0.9), *(completion([7, 8], None) for _ in range(3))]
    t = trainer(model)
    before = weights(t)
    stats = t.train_step(0, [group(0, [1], answers)])
    assert same(before, weights(t))
    assert all(math.isfinite(value) for value in stats.values())
    assert stats["training/zero_variance_ratio"] == 1.0
    assert stats["critic/advantages/max"] == 0.0


def test_ungraded_completions_leave_numerator_and_denominator_s043(model):
    two = [completion([5, 6], 1.0), completion([7], 0.0)]
    alone = trainer(model).train_step(0, [group(0, [1], two)])
    with_failure = trainer(model).train_step(0, [group(0, [1], [*two, completion([9, 9], None)])])
    assert with_failure == pytest.approx(alone)


@pytest.mark.parametrize("poison", ["logprob", "reward"])
def test_a_step_that_is_not_finite_is_skipped_s083(model, poison):
    groups = random_groups(2, 4, seed=8)
    first = groups[0].completions[0]
    bad = (
        replace(first, logprobs=(float("nan"), *first.logprobs[1:]))
        if poison == "logprob"
        else replace(first, reward=float("nan"))
    )
    poisoned = [replace(groups[0], completions=(bad, *groups[0].completions[1:])), groups[1]]
    t, clean = trainer(model), trainer(model)
    before = weights(t)
    stats = t.train_step(0, poisoned)
    assert stats["actor/skipped"] == 1.0
    assert all(math.isfinite(value) for value in stats.values())
    assert same(before, weights(t))
    # nothing lingers: the next step is the one a fresh trainer takes
    assert t.train_step(1, groups)["actor/skipped"] == 0.0
    clean.train_step(1, groups)
    assert same(weights(clean), weights(t))


def test_an_absurd_learning_rate_never_makes_weights_that_are_not_finite_s083(model):
    t = trainer(model, actor__optim__lr=1e30)
    stats = [t.train_step(s, random_groups(2, 4, seed=s), frozenset({0, 1})) for s in range(3)]
    assert stats[-1]["actor/skipped"] == 1.0
    assert all(torch.isfinite(w).all() for w in weights(t).values())


@pytest.mark.parametrize("kind", ["none", "tis", "decoupled"])
def test_several_updates_keep_one_proximal_policy(model, kind):
    """Two epochs: the second update's ratio is against the weights at the step's start."""
    groups = random_groups(4, 4, seed=9)
    t = trainer(
        model,
        actor__ppo_epochs=2,
        actor__optim__lr=1e-3,
        actor__optim__eps=1e-4,  # entries with no gradient must not move by rounding
        algorithm__rollout_correction__type=kind,
    )
    stats = t.train_step(0, groups)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    losses, old = [], None
    for _ in range(2):
        loss, now = reference_loss(lm, groups, kind, old)
        old = now if old is None else old
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert abs(losses[1] - losses[0]) > 1e-3
    assert stats["actor/pg_loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    if kind != "none":  # there the first update already differs from μ
        assert stats["actor/ppo_kl"] == pytest.approx(float((old - now).mean()) / 2, abs=1e-5)


def test_mini_batches_are_updates_of_their_own(model):
    groups = random_groups(4, 4, seed=10)
    minis = trainer(model, actor__ppo_mini_batch_size=2, algorithm__rollout_correction__type="none")
    whole = trainer(model, algorithm__rollout_correction__type="none")
    halves = trainer(model, data__train_batch_size=2, algorithm__rollout_correction__type="none")
    minis.train_step(0, groups)
    whole.train_step(0, groups)
    halves.train_step(0, groups[:2])
    halves.train_step(0, groups[2:])
    assert same(weights(minis), weights(halves))
    assert not same(weights(minis), weights(whole))


def test_learning_rate_follows_the_step(model):
    t = trainer(model, actor__optim__lr_warmup_steps=4, actor__optim__lr_scheduler_type="linear")
    groups = random_groups(2, 4, seed=1)
    assert t.train_step(0, groups)["actor/lr"] == 0.0025
    assert t.train_step(2, groups)["actor/lr"] == 0.0075
    assert t.train_step(7, groups, frozenset({0, 1}))["actor/lr"] == pytest.approx(0.005)


def test_share_deals_each_mini_batch_out():
    ids = list(range(10, 18))
    assert share(ids, 0, 2, 4) == [10, 12, 14, 16]
    assert share(ids, 1, 2, 4) == [11, 13, 15, 17]
    assert share(ids, 0, 1, 4) == ids
    assert share(ids, 1, 2, 2) == [11, 13, 15, 17]
    assert share(ids, 3, 4, 8) == [13, 17]


def test_auto_is_what_the_machine_multiplies_fast():
    assert compute_dtype("float32", CPU) == torch.float32
    assert compute_dtype("bfloat16", CPU) == torch.bfloat16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert compute_dtype("auto", CPU) == (torch.bfloat16 if native else torch.float32)
    assert compute_dtype("auto", torch.device("cuda")) == torch.bfloat16
