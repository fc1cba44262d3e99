"""What a trainer hands out and takes back: staged weights, checkpoints, exported folders."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.errors import InvalidSpec
from services.learner.masters import Masters
from tests.support.learning import random_groups
from tests.support.tiny_model import build_tiny_model
from tests.support.trainers import same, trainer, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


def test_weights_are_copies_in_the_rollout_dtype(model):
    t = trainer(model, rollout__dtype="bfloat16")
    staged = t.weights()
    names = [name for name, _ in staged]
    assert "lm_head.weight" not in names and len(names) == len(set(names))
    assert {tensor.dtype for _, tensor in staged} == {torch.bfloat16}
    kept = {name: tensor.clone() for name, tensor in staged}
    t.train_step(0, random_groups(2, 4))
    assert same(kept, dict(staged))
    assert not same(kept, weights(t))


def test_an_untied_head_is_among_the_weights(tmp_path):
    path = build_tiny_model(tmp_path / "untied", tie_embeddings=False)
    assert "lm_head.weight" in weights(trainer(path))


def test_state_carries_on_exactly(model, tmp_path):
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    steps = [random_groups(2, 4, seed=s) for s in range(4)]
    late = frozenset({0, 1})
    t = trainer(model)
    for s in (0, 1):
        t.train_step(s, steps[s])
    save(t.state(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    resumed = trainer(model)
    state = resumed.state()
    load(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    resumed.load_state(state)
    for s in (2, 3):
        assert resumed.train_step(s, steps[s], late) == t.train_step(s, steps[s], late)
    assert same(weights(resumed), weights(t))


def test_an_update_waits_until_the_state_is_taken(model):
    t, groups, taken = trainer(model), random_groups(2, 4), Future()
    t.hold(taken)
    before, read = weights(t), []

    def read_state() -> None:
        while all(p.grad is None for p in t.policy.parameters()):
            pass  # the backward pass has begun, so the update comes next
        read.append({n: p.detach().clone() for n, p in t.state()["model"].items()})
        taken.set_result(None)

    reader = Thread(target=read_state)
    reader.start()
    t.train_step(0, groups)
    reader.join()
    assert same(read[0], before)
    assert not same(weights(t), before)
    t.train_step(1, groups)  # held once


def test_bfloat16_on_one_rank_has_float32_masters(model):
    groups = random_groups(3, 4, seed=2)
    half = trainer(model, actor__compute_dtype="bfloat16")
    exact = trainer(model)
    first = weights(half)
    assert same(first, weights(exact))  # masters are not rounded
    half_stats, exact_stats = half.train_step(0, groups), exact.train_step(0, groups)
    assert half_stats["actor/grad_norm"] == pytest.approx(exact_stats["actor/grad_norm"], rel=0.15)
    assert {p.dtype for p in half.policy.parameters()} == {torch.bfloat16}
    masters = half.state()["model"]
    for name, narrow in half.policy.lm.named_parameters():
        assert masters[name].dtype == torch.float32
        assert torch.equal(narrow, masters[name].bfloat16())
        # the first Adam step moves every weight by the learning rate in its gradient's direction
        moved = masters[name] - first[name]
        assert float(moved.abs().max()) == pytest.approx(1e-2, rel=0.05)


def test_masters_add_gradients_up_in_float32():
    layer = nn.Linear(1, 1, bias=False)
    masters = Masters(layer, torch.bfloat16)
    (master,) = masters.parameters.values()
    for _ in range(2):  # 256 + 1 is not a bfloat16
        for value in (256.0, 1.0):
            layer(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert master.grad.item() == 514.0
    assert layer.weight.grad is None


def test_a_bfloat16_state_carries_on_exactly(model):
    steps = [random_groups(2, 4, seed=s) for s in range(3)]
    whole = trainer(model, actor__compute_dtype="bfloat16")
    resumed = trainer(model, actor__compute_dtype="bfloat16")
    for number in (0, 1):
        whole.train_step(number, steps[number])
    resumed.load_state(whole.state())
    assert resumed.train_step(2, steps[2]) == whole.train_step(2, steps[2])
    assert same(weights(resumed), weights(whole))


def test_a_state_of_another_model_is_refused(model, tmp_path):
    other = trainer(build_tiny_model(tmp_path / "untied", tie_embeddings=False))
    with pytest.raises(InvalidSpec, match="another model"):
        trainer(model).load_state(other.state())


def test_export_loads_elsewhere(model, tmp_path):
    t = trainer(model)
    t.train_step(0, random_groups(2, 4))
    target = tmp_path / "run" / "model"
    t.export(target)
    t.train_step(1, random_groups(2, 4, seed=1))
    t.export(target)  # replaces
    lm = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert same({n: p.detach() for n, p in lm.named_parameters()}, weights(t))
    text = "what is 1 + 2?"
    assert (
        AutoTokenizer.from_pretrained(target)(text)["input_ids"]
        == AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    )
    assert (target / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert [p.name for p in target.parent.iterdir()] == ["model"]


def test_export_keeps_the_model_s_own_dtype(tmp_path):
    path = build_tiny_model(tmp_path / "bf16", dtype="bfloat16")
    trainer(path).export(tmp_path / "out")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InvalidSpec, match=r"no config\.json"):
        trainer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(InvalidSpec, match="cannot load the model"):
        trainer(tmp_path)
