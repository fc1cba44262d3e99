"""Every algorithm as a training step, against the same step written out plainly.

Reference: `tests.support.plain_step`, padded batch, whole logits, scalar formulas; float32.
Losses agree to 2e-5, gradient norms to 1e-3 of themselves. Then the invariances: rows,
order, mini-batches of tokens that a row cuts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.errors import InvalidSpec
from headway.messages import Group
from tests.support.learning import completion, group, job, padded_logprobs, random_groups
from tests.support.plain_step import Plain, kl, plain_step
from tests.support.tiny_model import build_tiny_model
from tests.support.trainers import same, trainer, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(
        tmp_path_factory.mktemp("model"), seed=3, num_layers=1, hidden_size=32, intermediate_size=32
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Another policy: a reference that the trained one is not."""
    return build_tiny_model(
        tmp_path_factory.mktemp("other"), seed=4, num_layers=1, hidden_size=32, intermediate_size=32
    )


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def groups(model) -> list[Group]:
    """Sampled by a policy near the model's, the noise of some completions larger."""
    made = random_groups(4, 4, seed=5, equal=[2])
    lm, rng = load(model), torch.Generator().manual_seed(1)
    near = []
    for i, g in enumerate(made):
        with torch.no_grad():
            lp = padded_logprobs(lm, [(g.ticket.prompt_ids, c.token_ids) for c in g.completions])
        parts = lp.split([len(c.token_ids) for c in g.completions])
        moved = [
            replace(
                c,
                logprobs=tuple(
                    (
                        part
                        + (0.02, 0.5, 0.1, 1.0)[(i + j) % 4] * torch.randn(len(part), generator=rng)
                    )
                    .clamp(max=-1e-3)
                    .tolist()
                ),
            )
            for j, (c, part) in enumerate(zip(g.completions, parts, strict=True))
        ]
        near.append(replace(g, completions=tuple(moved)))
    return near


A, RC = "algorithm__", "algorithm__rollout_correction__"
CASES: dict[str, dict[str, Any]] = {
    **{
        name: {A + "adv_estimator": name}
        for name in (
            "dr_grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
        )
    },
    "discounted": {A + "adv_estimator": "reinforce_plus_plus", A + "gamma": 0.8},
    **{name: {A + "policy_loss": name} for name in ("gspo", "gmpo", "cispo", "sapo", "gpg")},
    "reinforce": {A + "policy_loss": "reinforce", RC + "type": "icepop"},
    **{
        f"{name} bypass": {A + "policy_loss": name, RC + "type": "none"}
        for name in ("gspo", "gmpo", "cispo", "sapo")
    },
    "gmpo of tokens": {A + "policy_loss": "gmpo", A + "adv_estimator": "reinforce_plus_plus",
                       RC + "type": "none", A + "gamma": 0.9},
    **{
        mode: {A + "loss_agg_mode": mode, RC + "type": "none"}
        for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
    },
    "norm": {A + "loss_agg_mode": "seq-mean-token-sum-norm", A + "loss_scale_factor": 32},
    "tis sequence": {RC + "level": "sequence"},
    "icepop sequence": {RC + "type": "icepop", RC + "level": "sequence"},
    "geometric": {RC + "rollout_rs": "geometric", RC + "rs_low": 0.9, RC + "rs_high": 1.1},
    "token_k1": {RC + "rollout_rs": "token_k1", RC + "rs_high": 1.3},
    "seq_max_k3": {RC + "rollout_rs": "seq_max_k3", RC + "rs_high": 0.3, RC + "type": "none",
                   RC + "proximal": "recompute"},
    "log-linear": {RC + "type": "decoupled", RC + "proximal": "log_linear"},
    "gspo log-linear": {A + "policy_loss": "gspo", RC + "proximal": "log_linear",
                        RC + "proximal_alpha": 0.3},
    "gspo sequence": {A + "policy_loss": "gspo", RC + "level": "sequence"},
    "overlong": {"reward__overlong_buffer": {"enable": True, "len": 5}, "rollout__max_tokens": 10},
}  # fmt: skip


def check(stats: dict[str, float], plain: Plain, lm: Any) -> None:
    plain.loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), 1e9)
    assert stats["actor/pg_loss"] == pytest.approx(plain.pg_loss, abs=2e-5, rel=1e-4)
    assert stats["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert stats["actor/grad_norm"] > 1e-3 and stats["actor/skipped"] == 0.0


@pytest.mark.parametrize("case", CASES)
def test_one_step_equals_the_plain_one(model, groups, case):
    t = trainer(model, **CASES[case])
    spec, lm = job(model, **CASES[case]), load(model)
    check(t.train_step(0, groups), plain_step(lm, groups, spec), lm)


@pytest.mark.parametrize("case", ["gspo", "gmpo", "tis sequence", "gspo bypass", "log-linear"])
def test_a_second_update_keeps_the_step_s_proximal_policy(model, groups, case):
    """SGD-like: a tiny learning rate would hide it, so the second update is far from the first."""
    settings = CASES[case] | {
        "actor__ppo_epochs": 2, "actor__optim__lr": 1e-3, "actor__optim__eps": 1e-4,
    }  # fmt: skip
    spec, lm = job(model, **settings), load(model)
    stats = trainer(model, **settings).train_step(0, groups)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    losses, old = [], None
    for _ in range(2):
        plain = plain_step(lm, groups, spec, old=old)
        old = plain.logprobs if old is None else old
        optimizer.zero_grad()
        plain.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        losses.append(plain.pg_loss)
    assert abs(losses[1] - losses[0]) > 1e-4
    assert stats["actor/pg_loss"] == pytest.approx(sum(losses) / 2, abs=2e-5)


@pytest.mark.parametrize("case", ["reinforce_plus_plus", "gspo bypass", "tis sequence", "norm"])
def test_rows_and_order_change_nothing(model, groups, case):
    a = trainer(model, **CASES[case]).train_step(0, groups)
    short = {
        "actor__ppo_max_token_len_per_gpu": 20,
        "data__max_prompt_length": 10,
        "rollout__max_tokens": 10,
    }
    b = trainer(model, **CASES[case], **short).train_step(0, groups[::-1])
    assert b["training/packed_tokens"] > a["training/packed_tokens"]
    for name in a.keys() - {"training/packed_tokens"}:
        assert b[name] == pytest.approx(a[name], abs=2e-5, rel=1e-4), name


def reference_of(folder: Path, groups: list[Group]) -> torch.Tensor:
    pairs = [(g.ticket.prompt_ids, c.token_ids) for g in groups for c in g.completions]
    with torch.no_grad():
        return padded_logprobs(load(folder), pairs)


def with_reference(model: Path, other: Path, monkeypatch: Any, **changes: Any) -> Any:
    """A trainer whose reference is another model, as after some steps."""
    from services.learner import trained as module

    real = module.load_reference
    monkeypatch.setattr(module, "load_reference", lambda path, *rest: real(other, *rest))
    return trainer(model, **changes)


@pytest.mark.parametrize("form", ["k1", "k2", "low_var_kl", "abs"])
def test_kl_in_the_loss(model, other, groups, monkeypatch, form):
    settings = {
        "actor__use_kl_loss": True, "actor__kl_loss_type": form, "actor__kl_loss_coef": 0.3,
        A + "loss_agg_mode": "seq-mean-token-mean",
    }  # fmt: skip
    t = with_reference(model, other, monkeypatch, **settings)
    spec, lm = job(model, **settings), load(model)
    stats = t.train_step(0, groups)
    plain = plain_step(lm, groups, spec, ref_logprobs=reference_of(other, groups))
    assert stats["actor/kl_loss"] == pytest.approx(plain.kl_loss, rel=1e-4)
    assert stats["actor/kl_coef"] == 0.3
    check(stats, plain, lm)  # the group without variance has the KL's gradient


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_kl_in_the_reward_and_its_controller(model, other, groups, monkeypatch, name):
    settings = {
        A + "adv_estimator": name, A + "use_kl_in_reward": True, A + "kl_penalty": "low_var_kl",
        A + "kl_ctrl": {"type": "adaptive", "kl_coef": 0.2, "target_kl": 0.01, "horizon": 100},
    }  # fmt: skip
    t = with_reference(model, other, monkeypatch, **settings)
    spec, lm = job(model, **settings), load(model)
    now, far = reference_of(model, groups), reference_of(other, groups)
    sizes = [len(c.token_ids) for g in groups for c in g.completions]
    distance = [kl("k3", x, y) for x, y in zip(now, far, strict=True)]
    rows = [row.tolist() for row in torch.stack(distance).split(sizes)]
    costs = [[0.2 * x for x in row] for row in rows]
    stats = t.train_step(0, groups)
    check(stats, plain_step(lm, groups, spec, costs=costs), lm)
    current = sum(sum(row) / len(row) for row in rows) / len(rows)
    assert stats["actor/reward_kl_penalty"] == pytest.approx(current, rel=1e-4)
    assert stats["actor/reward_kl_penalty_coeff"] == 0.2
    rewards = [c.reward or 0.0 for g in groups for c in g.completions]
    penalised = [r - sum(c) for r, c in zip(rewards, costs, strict=True)]
    assert stats["critic/rewards/mean"] == pytest.approx(sum(penalised) / 16, rel=1e-4)
    # 16 completions of a horizon of 100, far beyond the target: 1 + 0.2 * 16 / 100
    assert t.state()["kl_ctrl"]["kl_coef"].item() == pytest.approx(0.2 * 1.032)
    again = with_reference(model, other, monkeypatch, **settings)
    again.load_state({k: dict(v) for k, v in t.state().items()})
    after = again.train_step(1, groups, frozenset(range(4)))
    assert after["actor/reward_kl_penalty_coeff"] == pytest.approx(0.2 * 1.032)


def test_entropy_bonus(model, groups):
    settings = {"actor__entropy_coeff": 0.5, RC + "type": "none"}
    stats = trainer(model, **settings).train_step(0, groups)
    spec, lm = job(model, **settings), load(model)
    plain = plain_step(lm, groups, spec)
    entropies = []
    for g in groups:
        for c in g.completions:
            ids = torch.tensor([[*g.ticket.prompt_ids, *c.token_ids]])
            logs = lm(input_ids=ids).logits[0, len(g.ticket.prompt_ids) - 1 : -1].log_softmax(-1)
            entropies.append(-(logs.exp() * logs).sum(-1))
    entropy = torch.cat(entropies).mean()
    plain.loss = plain.loss - 0.5 * entropy
    assert stats["actor/entropy"] == pytest.approx(float(entropy.detach()), rel=1e-5)
    check(stats, plain, lm)


def test_empty_and_one_token_completions(model):
    answers = [completion([5], 1.0), completion([], 0.0), completion([7, 9], 0.5)]
    made = [group(0, [1, 2, 3], answers)]
    for case in ("gspo bypass", "gmpo", "opo", "reinforce_plus_plus", "geometric", "tis sequence"):
        stats = trainer(model, data__train_batch_size=1, **CASES[case]).train_step(0, made)
        assert stats["actor/skipped"] == 0.0, case
        if case != "geometric":  # there every completion is too far from its sampler
            assert stats["actor/grad_norm"] > 0, case
    # two completions have tokens: the mean over completions is over two
    plain = trainer(model, **CASES["seq-mean-token-sum"]).train_step(0, made)
    half = trainer(model, **CASES["token-sum"]).train_step(0, made)
    assert plain["actor/pg_loss"] == pytest.approx(half["actor/pg_loss"] / 2, rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "opo", "reinforce_plus_plus"])
def test_a_step_without_any_token_changes_nothing(model, name):
    settings = {A + "adv_estimator": name, A + "use_kl_in_reward": True, "actor__use_kl_loss": True}
    t = trainer(model, data__train_batch_size=1, **settings)
    before = weights(t)
    for reward in (1.0, None):
        answers = [completion([], reward), completion([], 0.0)]
        assert t.train_step(0, [group(0, [1, 2], answers)])["actor/skipped"] == 0.0
    assert same(before, weights(t))


CUSTOM = """
from headway.rl.losses import PolicyLoss
from headway.rl.registry import register_advantage, register_policy_loss

@register_advantage("plain_reward", whiten=True)
def plain_reward(rewards, graded, lengths):
    return rewards * graded

@register_policy_loss("plain_gradient")
def plain_gradient(logprobs, old_logprobs, advantages):
    return PolicyLoss.unclipped(-advantages * logprobs)
"""


def test_a_file_of_one_s_own(model, groups, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CUSTOM)
    settings = {
        A + "custom": str(file), A + "adv_estimator": "plain_reward",
        A + "policy_loss": "plain_gradient",
    }  # fmt: skip
    mine = trainer(model, **settings).train_step(0, groups)
    known = {A + "adv_estimator": "reinforce_plus_plus", A + "policy_loss": "reinforce"}
    theirs = trainer(model, **known).train_step(0, groups)
    assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)  # gamma 1: the outcome on every token


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            CUSTOM.replace("plain_", "other_"),
            r"no advantage is named other_rewards \(did you mean other_reward\?\)",
        ),
        ("import nothing_of_this_name", r"mine\.py failed: ModuleNotFoundError"),
        (CUSTOM.replace('"plain_reward"', '"grpo"'), "the advantage name grpo is taken"),
        (None, "there is no file"),
    ],
)
def test_a_file_that_is_no_help_is_refused(model, tmp_path, text, said):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidSpec, match=said):
        trainer(model, **{A + "custom": str(file), A + "adv_estimator": "other_rewards"})
