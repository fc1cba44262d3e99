"""The critic's values, loss and gradients against plain padded float64, and that it learns.

Reference: `tests.support.plain_critic`. Packed values agree with padded ones to 1e-5 of the
largest, gradients to 1e-4 of the largest entry, losses to 1e-5.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.messages import Group
from headway.rl.returns import explained_variance
from services.learner.trainer import FsdpTrainer
from tests.support import plain_critic as plain
from tests.support.critics import PPO, critic_weights, with_head
from tests.support.learning import completion, group, job, padded_logprobs, random_groups
from tests.support.plain_critic import PlainCritic
from tests.support.plain_step import mean, sequence_terms
from tests.support.tiny_model import build_tiny_model
from tests.support.trainers import trainer

A = "algorithm__"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(
        tmp_path_factory.mktemp("model"), seed=3, num_layers=2, hidden_size=32, intermediate_size=32
    )


def like(t: FsdpTrainer, model: Path) -> PlainCritic:
    """The plain critic with the trainer's head."""
    head = t.state()["critic_model"]
    return PlainCritic.load(model, head["value_head.weight"], float(head["value_head.bias"]))


def close(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    largest = max(float(g.abs().max()) for g in other.values())
    assert largest > 0
    for name, gradient in other.items():
        gap = float((mine[name].reshape(-1) - gradient.reshape(-1)).abs().max())
        assert gap < 1e-4 * largest, (name, gap, largest)


@pytest.mark.parametrize("row_tokens", [1024, 20])
@pytest.mark.parametrize("tied", [True, False])
def test_values_and_gradients_equal_a_padded_float64_critic(
    tmp_path, monkeypatch, row_tokens, tied
):
    model = build_tiny_model(tmp_path / "m", seed=5, num_layers=1, tie_embeddings=tied)
    rows = {
        "actor__ppo_max_token_len_per_gpu": row_tokens,
        "data__max_prompt_length": 10,
        "rollout__max_tokens": 10,
    }
    groups = random_groups(4, 4, seed=5, equal=[2])
    settings = {**PPO, **rows, A + "gamma": 0.9, A + "lam": 0.7}
    t = with_head(trainer(model, **settings))
    spec, reference = job(model, **settings), like(t, model)
    values = reference.values(groups)
    assert float(values.detach().std()) > 0.1  # flat values would hide mistakes
    aims = plain.aim(groups, values.tolist(), spec)
    targets = [x for row in aims.targets for x in row]
    loss = plain.value_loss(values, values.tolist(), targets, 0.5)
    loss.backward()  # type: ignore[no-untyped-call]

    seen: dict[str, Tensor] = {}
    taken = t.critic.optimiser.update

    def look(value: float) -> tuple[float, bool]:
        seen.update({n: p.grad.clone() for n, p in t.critic.optimiser.parameters.items()})
        return taken(value)

    monkeypatch.setattr(t.critic.optimiser, "update", look)
    stats = t.train_step(0, groups)
    close(seen, {n: p.grad for n, p in reference.parameters().items() if p.grad is not None})
    assert stats["critic/vf_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert stats["critic/vf_clipfrac"] == 0.0  # V is V_old in the first update
    for name, found in (("values", values.tolist()), ("returns", targets)):
        assert stats[f"critic/{name}/mean"] == pytest.approx(sum(found) / len(found), abs=1e-5)
        assert stats[f"critic/{name}/max"] == pytest.approx(max(found), abs=1e-5)
        assert stats[f"critic/{name}/min"] == pytest.approx(min(found), abs=1e-5)
    assert stats["critic/vpred_mean"] == pytest.approx(stats["critic/values/mean"], abs=1e-6)
    known = plain.explained_variance(values.tolist(), targets)
    assert stats["critic/vf_explained_var"] == pytest.approx(known, abs=1e-4)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in seen.values()))
    assert stats["critic/grad_norm"] == pytest.approx(norm, rel=1e-5)


def lm_of(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_policy_s_step_has_the_critic_s_advantages(model, mode):
    settings = {**PPO, A + "gamma": 0.95, A + "lam": 0.5, A + "loss_agg_mode": mode}
    groups = random_groups(4, 4, seed=6)
    t = with_head(trainer(model, **settings))
    spec, reference = job(model, **settings), like(t, model)
    aims = plain.aim(groups, reference.values(groups).tolist(), spec)
    stats = t.train_step(0, groups)
    lm = lm_of(model)
    lp = padded_logprobs(
        lm, [(g.ticket.prompt_ids, c.token_ids) for g in groups for c in g.completions]
    )
    made = [c for g in groups for c in g.completions]
    parts = lp.split([len(c.token_ids) for c in made])
    terms = [
        sequence_terms(spec, part, part.detach(), c, a)
        for part, c, a in zip(parts, made, aims.advantages, strict=True)
    ]
    loss = mean(spec, terms)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([p.grad for p in lm.parameters() if p.grad is not None])
    assert stats["actor/pg_loss"] == pytest.approx(float(loss.detach()), abs=2e-5)
    assert stats["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_a_kl_in_the_reward_is_paid_token_by_token(model):
    settings = {
        **PPO, A + "lam": 0.9, A + "use_kl_in_reward": True, A + "kl_penalty": "k2",
        A + "kl_ctrl": {"kl_coef": 0.5},
        A + "rollout_correction": {"type": "none", "proximal": "bypass"},
    }  # fmt: skip
    groups = random_groups(2, 3, seed=7)
    t = with_head(trainer(model, **settings))
    spec, reference = job(model, **settings), like(t, model)
    with torch.no_grad():
        pairs = [(g.ticket.prompt_ids, c.token_ids) for g in groups for c in g.completions]
        now = padded_logprobs(lm_of(model), pairs)  # the reference is the first policy
    made = [c for g in groups for c in g.completions]
    costs = []
    for c, part in zip(made, now.split([len(c.token_ids) for c in made]), strict=True):
        gaps = [mu - float(x) for mu, x in zip(c.logprobs, part, strict=True)]
        costs.append([0.5 * 0.5 * gap * gap for gap in gaps])
    values = reference.values(groups)
    aims = plain.aim(groups, values.tolist(), spec, costs)
    targets = [x for row in aims.targets for x in row]
    stats = t.train_step(0, groups)
    assert stats["critic/returns/mean"] == pytest.approx(sum(targets) / len(targets), rel=1e-4)
    assert stats["critic/returns/min"] == pytest.approx(min(targets), rel=1e-4)
    loss = plain.value_loss(values, values.tolist(), targets, 0.5)
    assert stats["critic/vf_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)


def test_a_second_epoch_is_clipped_round_the_values_of_the_step_s_start(model):
    clip = 0.02
    settings = {
        **PPO, "critic__ppo_epochs": 2, "critic__cliprange_value": clip,
        "critic__optim__eps": 1e-4,  # entries with no gradient must not move by rounding
    }  # fmt: skip
    groups = random_groups(4, 4, seed=8)
    t = with_head(trainer(model, **settings))
    spec, reference = job(model, **settings), like(t, model)
    first = reference.values(groups).tolist()
    targets = [x for row in plain.aim(groups, first, spec).targets for x in row]
    parameters = [p for p in reference.parameters().values() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.0)
    losses, clipped = [], []
    for _ in range(2):
        values = reference.values(groups)
        loss = plain.value_loss(values, first, targets, clip)
        near = [
            min(max(v, o - clip), o + clip) for v, o in zip(values.tolist(), first, strict=True)
        ]
        held = [
            abs(n - r) > abs(v - r) for n, v, r in zip(near, values.tolist(), targets, strict=True)
        ]
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()
        losses.append(float(loss.detach()))
        clipped.append(sum(held) / len(held))
    stats = t.train_step(0, groups)
    assert clipped[0] == 0.0 < clipped[1] < 1.0
    assert stats["critic/vf_loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
    assert stats["critic/vf_clipfrac"] == pytest.approx(clipped[1] / 2, abs=0.03)
    assert stats["actor/grad_norm"] > 0  # one update of the policy: the actor's own epochs
    moved = {n: float((p.detach().reshape(-1) - critic_weights(t)[n].reshape(-1)).abs().max())
             for n, p in reference.parameters().items()}  # fmt: skip
    assert max(moved.values()) < 2e-4


def test_without_a_clip_the_loss_is_the_squared_error(model):
    groups = random_groups(2, 4, seed=9)
    free = trainer(model, **PPO, critic__ppo_epochs=3, critic__cliprange_value=None)
    held = trainer(model, **PPO, critic__ppo_epochs=3, critic__cliprange_value=1e-3)
    a, b = free.train_step(0, groups), held.train_step(0, groups)
    assert a["critic/vf_clipfrac"] == 0.0 < b["critic/vf_clipfrac"]
    assert a["critic/vf_loss"] < b["critic/vf_loss"]


def test_the_critic_has_mini_batches_of_its_own(model):
    groups = random_groups(4, 4, seed=10)
    t = trainer(model, **PPO, critic__ppo_mini_batch_size=1, critic__ppo_epochs=2)
    t.train_step(0, groups)
    state = t.state()
    assert {float(n) for n in state["critic_updates"].values()} == {8.0}
    assert {float(n) for n in state["updates"].values()} == {1.0}


def told_by_the_prompt(step: int) -> list[Group]:
    """The third token of a prompt says what every answer earns."""
    rng = torch.Generator().manual_seed(step)
    made = []
    for i in range(8):
        worth = i % 2
        answers = [torch.randint(10, 300, (3,), generator=rng).tolist() for _ in range(2)]
        prompt = [1, 2, 7 if worth else 8]
        versions = [step] * 3
        made.append(
            group(i, prompt, [completion(a, float(worth), versions=versions) for a in answers])
        )
    return made


def test_a_critic_learns_what_the_prompt_tells(model):
    settings = {
        A + "adv_estimator": "gae", "critic__optim__lr": 3e-3, "data__train_batch_size": 8,
        "rollout__n": 2, "trainer__total_training_steps": 40, "trainer__critic_warmup": 39,
    }  # fmt: skip
    t = trainer(model, **settings)
    explained = []
    for step in range(30):
        stats = t.train_step(step, told_by_the_prompt(step))
        explained.append(stats["critic/vf_explained_var"])
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # a head of zeros foresees nothing
    assert min(explained[-5:]) > 0.9, explained


def test_explained_variance_by_hand():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns, list) == 1.0
    assert explained_variance(torch.full((4,), 7.0), returns, list) == 0.0
    # gaps 0, 1, 2, 2: variance 0.6875 of 1.25
    values = torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert explained_variance(values, returns, list) == pytest.approx(1 - 0.6875 / 1.25)
    assert math.isnan(explained_variance(values, torch.ones(4), list))
    assert math.isnan(explained_variance(torch.zeros(0), torch.zeros(0), list))
