"""The algorithm section of a job: names, the defaults of each loss, what is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml

from headway.errors import InvalidSpec
from headway.jobspec import JobSpec, parse_job
from headway.rl import names
from services.learner.credit import estimator


def job(rollout: dict[str, Any] | None = None, **algorithm: Any) -> JobSpec:
    return parse_job({
        "model": {"path": "org/name"},
        "data": {"source": "reasoning_gym", "name": "chain_sum"},
        "reward": {"grader": {"type": "numeric"}},
        "trainer": {"total_training_steps": 3},
        "rollout": rollout or {},
        "algorithm": algorithm,
    })  # fmt: skip


def test_the_defaults_are_grpo_with_truncated_importance_sampling():
    a = job().algorithm
    assert (a.adv_estimator, a.policy_loss, a.loss_agg_mode) == ("grpo", "ppo_clip", "token-mean")
    assert (a.clip_ratio_low, a.clip_ratio_high, a.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert (a.rollout_correction.type, a.rollout_correction.proximal) == ("tis", "recompute")


@pytest.mark.parametrize(
    ("loss", "clips", "mode"),
    [
        ("gspo", (3e-4, 4e-4), "seq-mean-token-mean"),
        ("gmpo", (0.4, 0.4), "seq-mean-token-mean"),
        ("sapo", (0.2, 0.2), "seq-mean-token-mean"),
        ("cispo", (0.2, 0.2), "token-mean"),
    ],
)
def test_a_loss_comes_with_its_own_clip_and_mean(loss, clips, mode):
    a = job(policy_loss=loss).algorithm
    assert (a.clip_ratio_low, a.clip_ratio_high) == clips and a.loss_agg_mode == mode
    assert a.clip_ratio_c is None
    assert job(policy_loss=loss, clip_ratio_high=0.5).algorithm.clip_ratio_high == 0.5


def test_verl_s_names_are_taken_and_resolved():
    a = job(policy_loss="vanilla", kl_penalty="low_var_kl").algorithm
    assert (a.policy_loss, a.kl_penalty) == ("ppo_clip", "k3")
    assert job(policy_loss="geo_mean").algorithm.clip_ratio_low == 0.4


def test_a_resolved_job_reads_back_as_itself():
    for made in (
        job(),
        job(policy_loss="gspo", rollout_correction={"type": "none"}),
        job(policy_loss="geo_mean", rollout_correction={"rollout_rs": "geometric"}),
        job(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=9),
    ):
        assert parse_job(yaml.safe_load(made.to_yaml())) == made


def test_every_name_of_an_advantage_is_known_to_the_learner():
    for name in set(names.ADVANTAGES) - {"remax", *names.PER_TOKEN}:
        assert estimator(job(adv_estimator=name).algorithm) is not None
    whitened = estimator(job(adv_estimator="reinforce_plus_plus_baseline").algorithm)
    assert whitened.whiten


RC = "rollout_correction"


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            {"adv_estimator": "grop"},
            r"algorithm: adv_estimator: there is no grop \(did you mean grpo",
        ),
        ({"policy_loss": "cipso"}, r"policy_loss: there is no cipso \(did you mean cispo\?\)"),
        (
            {"loss_agg_mode": "token_mean"},
            r"loss_agg_mode: there is no token_mean \(did you mean tok",
        ),
        ({"kl_penalty": "k4"}, r"algorithm\.kl_penalty: there is no k4"),
        (
            {RC: {"type": "icepopp"}},
            r"rollout_correction\.type: there is no icepopp \(did you mean",
        ),
        (
            {RC: {"rollout_rs": "seq_mean_k4"}},
            r"rollout_rs: there is no seq_mean_k4 \(did you mean",
        ),
        (
            {"adv_estimator": "rloo", "norm_adv_by_std_in_grpo": False},
            "belongs to grpo, not to rloo",
        ),
        ({"gamma": 0.9}, "gamma 0.9 discounts reinforce_plus_plus and gae, not grpo"),
        ({"lam": 0.9}, "lam 0.9 belongs to gae, not to grpo"),
        ({"policy_loss": "gspo", "loss_agg_mode": "token-mean"}, "policy_loss gspo is a mean over"),
        ({"policy_loss": "sapo", "clip_ratio_c": 3}, "dual clip of ppo_clip, not of sapo"),
        ({"clip_ratio_low": 1.0}, "clip_ratio_low 1 bounds no ratio from below with ppo_clip"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "divides by loss_scale_factor"),
        ({"loss_scale_factor": 9}, "set both or neither"),
        ({"kl_ctrl": {"type": "adaptive"}}, "steers the KL in the reward: set use_kl_in_reward"),
        ({RC: {"type": "tis", "proximal": "bypass"}}, "type tis would find every ratio to be 1"),
        (
            {RC: {"type": "none", "rollout_rs": "geometric"}},
            "rollout_rs geometric would find every",
        ),
        ({RC: {"type": "none", "level": "sequence"}}, "level sequence has no weight to make"),
        ({RC: {"proximal": "log_linear", "level": "sequence"}}, "known token by token"),
        ({RC: {"proximal": "log_linear", "rollout_rs": "geometric"}}, "known token by token"),
        ({RC: {"rollout_rs": "token_k3"}}, "rollout_rs token_k3 needs rs_high"),
        ({RC: {"rollout_rs": "token_k3", "rs_high": 1, "rs_low": 0.1}}, "has no lower bound"),
        ({RC: {"rs_high": 1.0}}, "bounds of rollout_rs, which is not set"),
        ({RC: {"rollout_rs": "token_k1", "rs_high": 0.5}}, "rs_low 2 is not below rs_high 0.5"),
        ({RC: {"icepop_low": 6}}, "icepop_low 6.0 is not below icepop_high 5.0"),
        ({"custom": "https://example.org/mine.py"}, "is not the path of a local .py file"),
        ({"custom": "mine.txt"}, "is not the path of a local .py file"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(algorithm, said):
    with pytest.raises(InvalidSpec, match=said):
        job(**algorithm)


def test_one_completion_a_prompt_wants_an_advantage_that_compares_none():
    one = {"n": 1}
    with pytest.raises(InvalidSpec, match="rloo compares completions of one prompt"):
        job(one, adv_estimator="rloo")
    assert job(one, adv_estimator="reinforce_plus_plus").rollout.n == 1
    assert job(one, adv_estimator="mine", custom="mine.py").rollout.n == 1
    with pytest.raises(InvalidSpec, match="dynamic_sampling would filter every group"):
        job(one, adv_estimator="reinforce_plus_plus", dynamic_sampling=True)


PPO = {"adv_estimator": "gae", "gamma": 0.99, "lam": 0.95}


def with_sections(algorithm: dict[str, Any], **sections: dict[str, Any]) -> JobSpec:
    raw = job(**algorithm).model_dump(mode="json", exclude_unset=True)
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return parse_job(raw)


def test_ppo_has_a_critic_as_the_actor_is_unless_told_otherwise():
    made = with_sections(PPO, actor={"ppo_mini_batch_size": 4, "ppo_epochs": 2})
    assert made.has_critic and made.critic.optim.lr == 1e-5 and made.actor.optim.lr == 1e-6
    assert (made.critic_mini_batch_size, made.critic_epochs) == (4, 2)
    made = with_sections(PPO, critic={"ppo_mini_batch_size": 2, "ppo_epochs": 3})
    assert (made.critic_mini_batch_size, made.critic_epochs, made.mini_batch_size) == (2, 3, 8)
    assert parse_job(yaml.safe_load(made.to_yaml())) == made
    assert not job().has_critic
    assert parse_job(yaml.safe_load(job().to_yaml())) == job()  # a critic of defaults is none
    assert job({"n": 1}, **PPO).rollout.n == 1


@pytest.mark.parametrize(
    ("algorithm", "sections", "said"),
    [
        ({}, {"critic": {"optim": {"lr": 1e-4}}}, "critic is of the critic, which .* grpo has not"),
        ({}, {"trainer": {"critic_warmup": 1}}, "trainer.critic_warmup is of the critic"),
        (PPO, {"trainer": {"critic_warmup": 3}}, "critic_warmup 3 leaves none of the 3 steps"),
        (PPO, {"actor": {"strategy": "megatron"}}, "actor.strategy megatron has no critic"),
        (PPO, {"critic": {"ppo_mini_batch_size": 3}}, "critic.ppo_mini_batch_size 3 does not div"),
        (
            PPO,
            {"critic": {"ppo_mini_batch_size": 1}, "actor": {"num_ranks": 2}},
            "num_ranks 2 does not divide the mini-batch of 1 groups .critic",
        ),
        (
            PPO,
            {"critic": {"cliprange": 0.2}},
            r"critic\.cliprange .did you mean critic\.cliprange_v",
        ),
    ],
)
def test_a_critic_that_does_not_go_is_refused(algorithm, sections, said):
    with pytest.raises(InvalidSpec, match=said):
        with_sections(algorithm, **sections)


def test_an_overlong_buffer_fits_the_answer():
    raw = job().model_dump(mode="json")
    raw["reward"]["overlong_buffer"] = {"enable": True, "len": 300}
    with pytest.raises(
        InvalidSpec, match=r"overlong_buffer\.len 300 is more than rollout\.max_tok"
    ):
        parse_job(raw)


def test_every_rejection_has_a_form_and_a_level():
    for rule in get_args(names.Rejection):
        if rule != "geometric":
            assert job(rollout_correction={"rollout_rs": rule, "rs_high": 1.5}) is not None
