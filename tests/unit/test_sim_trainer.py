"""The sim trainer: weights that tell which work was trained, in which order, with which lag."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from headway.errors import LedgerViolation
from services.learner.sim_trainer import SIZE, SimTokenizer, SimTrainer
from services.learner.trainer_settings import TrainerSettings
from tests.support.learning import job, random_groups

SPEC = job("none", algorithm__max_policy_lag=3)
GROUPS = random_groups(4, 4)


def after(*steps, settings=None):
    """The model after steps, each given as (step, groups)."""
    trainer = SimTrainer(SPEC, 0, 1, settings or TrainerSettings("sim"))
    for step, groups in steps:
        trainer.train_step(step, groups)
    return dict(trainer.weights())["sim.model"]


def test_the_same_work_gives_the_same_bits_whoever_sampled_it():
    elsewhere = [dataclasses.replace(g, node_id="other", attempt=3, score_s=9.0) for g in GROUPS]
    assert torch.equal(after((0, GROUPS), (1, GROUPS)), after((0, elsewhere), (1, GROUPS)))
    assert torch.isfinite(after((0, GROUPS))).all() and len(after()) == SIZE


@pytest.mark.parametrize(
    "other",
    [
        [(0, GROUPS[::-1]), (1, GROUPS)],  # order
        [(0, GROUPS), (2, GROUPS)],  # lag
        [(1, GROUPS), (0, GROUPS)],
        [(0, GROUPS)],
        [(0, [*GROUPS[:3], random_groups(4, 4, seed=1)[3]]), (1, GROUPS)],
    ],
)
def test_other_work_gives_other_bits(other):
    assert not torch.equal(after((0, GROUPS), (1, GROUPS)), after(*other))


def test_a_token_that_lags_too_much_is_refused():
    with pytest.raises(LedgerViolation, match="lag more than 3 versions at step 4"):
        after((4, GROUPS))


def test_a_saved_state_goes_on_as_if_nothing_had_happened(tmp_path):
    trainer = SimTrainer(SPEC, 0, 1, TrainerSettings("sim"))
    trainer.train_step(0, GROUPS)
    saved = {name: tensor.clone() for name, tensor in trainer.state().items()}
    later = SimTrainer(SPEC, 0, 1, TrainerSettings("sim"))
    later.load_state(saved)
    later.train_step(1, GROUPS)
    later.export(tmp_path)
    exported = load_file(tmp_path / "model.safetensors")["sim.model"]
    assert torch.equal(exported, after((0, GROUPS), (1, GROUPS)))


def test_the_ballast_is_as_large_as_asked():
    trainer = SimTrainer(SPEC, 0, 1, TrainerSettings("sim", sim_weight_mib=2.0))
    assert dict(trainer.weights())["sim.ballast"].nbytes == 2 << 20


def test_a_prompt_is_its_bytes():
    assert SimTokenizer().encode("a\u00e9") == [98, 196, 170]
