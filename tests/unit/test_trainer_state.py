"""What a trainer hands out and takes back: staged weights, checkpoints, exported folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.errors import InvalidSpec
from services.learner.trainer import FsdpTrainer
from tests.support.learning import job, random_groups
from tests.support.tiny_model import build_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


def trainer(model: Path, **changes) -> FsdpTrainer:
    return FsdpTrainer(model, job(model, **changes), 0, 1, CPU)


def weights(t: FsdpTrainer) -> dict[str, Tensor]:
    return dict(t.weights())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


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
