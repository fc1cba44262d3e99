"""A critic's place in training: warm-up, exact state, masks, skipped steps, a model of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.errors import InvalidSpec
from services.learner.trainer import FsdpTrainer
from tests.support.critics import PPO, critic_weights, with_head
from tests.support.learning import completion, group, job, random_groups
from tests.support.tiny_model import build_tiny_model
from tests.support.trainers import CPU, same, trainer, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(
        tmp_path_factory.mktemp("model"), seed=3, num_layers=2, hidden_size=32, intermediate_size=32
    )


def test_in_warm_up_the_policy_keeps_every_bit(model):
    groups = random_groups(4, 4, seed=11)
    settings = {**PPO, "actor__use_kl_loss": True, "actor__entropy_coeff": 0.1}
    t = trainer(model, **settings, trainer__critic_warmup=2)
    before, critic, digests = weights(t), critic_weights(t), [t.digest()]
    for step in (0, 1):
        stats = t.train_step(step, groups)
        assert same(before, weights(t))
        assert not same(critic, critic_weights(t))
        critic = critic_weights(t)
        assert stats["actor/skipped"] == 0.0 and stats["critic/grad_norm"] > 0
        assert not stats.keys() & {"actor/pg_loss", "actor/grad_norm", "actor/lr"}
        digests.append(t.digest())
    assert len(set(digests)) == 3  # what a replay compares has the critic in it
    assert {float(n) for n in t.state()["updates"].values()} == {0.0}
    stats = t.train_step(2, groups)
    assert stats["actor/grad_norm"] > 0
    assert not same(before, weights(t))


def test_state_carries_on_exactly(model, tmp_path):
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    settings = {**PPO, "trainer__critic_warmup": 1, "algorithm__max_policy_lag": 3}
    steps = [random_groups(2, 4, seed=s) for s in range(4)]
    t = trainer(model, **settings)
    for s in (0, 1):
        t.train_step(s, steps[s])
    save(t.state(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    resumed = trainer(model, **settings)
    state = resumed.state()
    load(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    resumed.load_state(state)
    assert resumed.digest() == t.digest()
    for s in (2, 3):
        assert resumed.train_step(s, steps[s]) == t.train_step(s, steps[s])
    assert same(weights(resumed), weights(t))
    assert same(critic_weights(resumed), critic_weights(t))
    with pytest.raises(InvalidSpec, match="another model"):
        trainer(model).load_state({k: v for k, v in t.state().items() if k != "model"})


def test_bfloat16_compute_has_float32_masters_and_carries_on_exactly(model):
    groups = random_groups(4, 4, seed=12)
    exact = with_head(trainer(model, **PPO)).train_step(0, groups)
    half = with_head(trainer(model, **PPO, actor__compute_dtype="bfloat16"))
    stats = half.train_step(0, groups)
    for name in ("critic/values/mean", "critic/vf_loss", "critic/grad_norm"):
        assert stats[name] == pytest.approx(exact[name], rel=0.1), name
    masters = half.state()["critic_model"]
    assert {p.dtype for p in masters.values()} == {torch.float32}
    for name, narrow in half.critic.critic.named_parameters():
        assert torch.equal(narrow, masters[name].bfloat16())
    resumed = trainer(model, **PPO, actor__compute_dtype="bfloat16")
    resumed.load_state(half.state())
    assert resumed.train_step(1, groups) == half.train_step(1, groups)
    assert same(critic_weights(resumed), critic_weights(half))


def test_masked_and_ungraded_tokens_are_nobody_s_values(model):
    """Late tokens and completions without a reward: as if they were not there."""
    kept = [completion([5, 6, 7], 1.0, versions=[5] * 3), completion([8], 0.0, versions=[5])]
    old = [completion([4, 4], 1.0, versions=[0, 0]), completion([3], 0.0, versions=[0])]
    lost = completion([9, 9], None, versions=[5, 5])
    plain_stats = with_head(trainer(model, **PPO)).train_step(5, [group(0, [1, 2], kept)])
    mixed = with_head(trainer(model, **PPO)).train_step(
        5, [group(0, [1, 2], [*kept, lost]), group(1, [1, 2], old)], frozenset({1})
    )
    for name in ("vf_loss", "grad_norm", "vf_explained_var", "values/mean", "returns/max"):
        assert mixed[f"critic/{name}"] == pytest.approx(plain_stats[f"critic/{name}"], rel=1e-5)
    assert mixed["actor/pg_loss"] == pytest.approx(plain_stats["actor/pg_loss"], abs=1e-6)


def test_groups_of_one_without_variance_and_empty_answers_train(model):
    one = {**PPO, "rollout__n": 1}
    equal = [group(i, [1, 2 + i], [completion([5 + i, 6], 0.5)]) for i in range(4)]
    stats = trainer(model, **one).train_step(0, equal)
    assert stats["critic/grad_norm"] > 0 and stats["actor/skipped"] == 0.0
    empty = [group(0, [1, 2], [completion([], 1.0), completion([7], 0.0)])]
    stats = trainer(model, **PPO, data__train_batch_size=1).train_step(0, empty)
    assert stats["training/num_tokens"] == 1 and stats["actor/skipped"] == 0.0
    nothing = [group(0, [1, 2], [completion([], 1.0), completion([], 0.0)])]
    t = trainer(model, **PPO, data__train_batch_size=1)
    before, critic = weights(t), critic_weights(t)
    stats = t.train_step(0, nothing)
    assert same(before, weights(t)) and same(critic, critic_weights(t))
    assert all(math.isfinite(value) for value in stats.values())


def test_a_reward_that_is_not_finite_skips_both_s083(model):
    groups = random_groups(2, 4, seed=8)
    bad = replace(groups[0].completions[0], reward=float("nan"))
    poisoned = [replace(groups[0], completions=(bad, *groups[0].completions[1:])), groups[1]]
    t = trainer(model, **PPO)
    before, critic = weights(t), critic_weights(t)
    stats = t.train_step(0, poisoned)
    assert (stats["critic/skipped"], stats["actor/skipped"]) == (1.0, 1.0)
    assert same(before, weights(t)) and same(critic, critic_weights(t))
    assert all(math.isfinite(value) for value in stats.values())


def test_a_critic_s_skip_in_warm_up_is_a_step_s_skip_s083(model):
    groups = random_groups(1, 2, seed=8)
    bad = replace(groups[0].completions[0], reward=float("inf"))
    poisoned = [replace(groups[0], completions=(bad, *groups[0].completions[1:]))]
    t = trainer(model, **PPO, trainer__critic_warmup=1)
    assert t.train_step(0, poisoned)["actor/skipped"] == 1.0


def test_the_critic_starts_from_a_model_of_its_own(model, tmp_path):
    other = build_tiny_model(tmp_path / "other", seed=9, num_layers=1, hidden_size=64)
    spec = job(model, **PPO, critic__model__path=str(other))
    t = FsdpTrainer(model, spec, 0, 1, CPU, other)
    assert t.state()["critic_model"]["value_head.weight"].shape == (1, 64)
    assert t.train_step(0, random_groups(4, 4))["critic/vf_loss"] > 0
    small = build_tiny_model(tmp_path / "small", vocab_size=300)
    with pytest.raises(InvalidSpec, match="knows 300 tokens and the policy 320"):
        FsdpTrainer(model, spec, 0, 1, CPU, small)


def test_an_update_waits_until_the_state_is_taken(model):
    from concurrent.futures import Future
    from threading import Thread

    t, groups, taken = trainer(model, **PPO), random_groups(2, 4), Future()
    t.hold(taken)
    before, read = critic_weights(t), []

    def read_state() -> None:
        while all(p.grad is None for p in t.critic.optimiser.parameters.values()):
            pass  # the backward pass has begun, so the update comes next
        read.append(critic_weights(t))
        taken.set_result(None)

    reader = Thread(target=read_state)
    reader.start()
    t.train_step(0, groups)
    reader.join()
    assert same(read[0], before)
    assert not same(critic_weights(t), before)
