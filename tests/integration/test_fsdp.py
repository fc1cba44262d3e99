"""Two Gloo processes train as one does, and read each other's checkpoints.

Float32: losses agree to 1e-5, weights after two steps at lr 1e-3 to 2e-6.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.learner.trainer import FsdpTrainer
from tests.support.fsdp_ranks import ALGORITHMS, CPU, LATE, algorithm_stats, batch, fsdp_job
from tests.support.rank_processes import largest_gap, run_ranks
from tests.support.tiny_model import build_tiny_model


class Runs:
    """The one-rank run in this process and the two-rank run beside it."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        self.folder = folder
        self.model = build_tiny_model(folder / "model", seed=4)
        one = FsdpTrainer(self.model, fsdp_job(self.model), 0, 1, CPU)
        self.before = dict(one.weights())
        self.stats = [one.train_step(0, batch(0), LATE)]
        self.after_one_step = dict(one.weights())
        save(one.state(), checkpoint_id=folder / "one", no_dist=True)
        self.stats.append(one.train_step(1, batch(1), LATE))
        self.after_two_steps = dict(one.weights())
        self.stats.append(one.train_step(2, batch(2), LATE))
        self.weights = dict(one.weights())
        self.ranks = run_ranks("tests.support.fsdp_ranks", folder, str(self.model), str(folder))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("fsdp"))


def test_ranks_agree_with_each_other_and_with_one(runs):
    """Step 1 has a rank without rows, and a mini-batch without any: nothing hangs or differs."""
    assert runs.ranks[0]["stats"] == runs.ranks[1]["stats"]
    for one, two in zip(runs.stats, runs.ranks[0]["stats"], strict=True):
        # rows are packed rank by rank, so shared prefixes may be run twice
        names = one.keys() - {"training/packed_tokens"}
        assert names == two.keys() - {"training/packed_tokens"}
        for name in names:
            assert two[name] == pytest.approx(one[name], abs=1e-5, rel=1e-4), name
    assert largest_gap(runs.before, runs.after_two_steps) > 1e-3
    assert largest_gap(runs.weights, runs.ranks[0]["weights"]) < 2e-6


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_that_look_beyond_a_rank(runs, name):
    assert runs.ranks[0]["algorithms"][name] == runs.ranks[1]["algorithms"][name]
    alone = algorithm_stats(name, runs.model, 0, 1)
    for one, two in zip(alone, runs.ranks[0]["algorithms"][name], strict=True):
        assert one["actor/grad_norm"] > 0
        for metric in one.keys() - {"training/packed_tokens"}:
            assert two[metric] == pytest.approx(one[metric], abs=1e-5, rel=1e-3), metric


def test_one_rank_s_nan_skips_the_update_on_all_s083(runs):
    assert [stats["actor/skipped"] for stats in runs.ranks[1]["stats"]] == [0.0, 0.0, 1.0]
    # the second mini-batch of the poisoned step was sound and trained
    assert largest_gap(runs.after_two_steps, runs.weights) > 1e-4


def test_only_rank_0_gets_the_weights(runs):
    assert runs.ranks[1]["weights"] == {}
    assert "lm_head.weight" not in runs.ranks[0]["weights"]


def test_one_rank_loads_what_two_saved(runs):
    from torch.distributed.checkpoint.state_dict_loader import load

    one = FsdpTrainer(runs.model, fsdp_job(runs.model), 0, 1, CPU)
    state = one.state()
    load(state, checkpoint_id=runs.folder / "two", no_dist=True)
    one.load_state(state)
    assert largest_gap(dict(one.weights()), runs.ranks[0]["weights"]) == 0.0
    updates = {float(n) for n in one.state()["updates"].values()}
    assert updates == {5.0}  # two steps of two mini-batches, and the sound half of the third


def test_two_ranks_load_what_one_saved_and_go_on(runs):
    resumed = runs.ranks[0]
    assert largest_gap(resumed["resumed"], runs.after_two_steps) < 2e-6
    assert resumed["resumed_stats"]["actor/pg_loss"] == pytest.approx(
        runs.stats[1]["actor/pg_loss"], abs=1e-5
    )


def test_export_of_two_ranks_loads_in_transformers(runs):
    lm = AutoModelForCausalLM.from_pretrained(runs.folder / "export", dtype=torch.float32)
    named = {name: p.detach() for name, p in lm.named_parameters()}
    assert largest_gap(named, runs.ranks[0]["weights"]) == 0.0


def test_bfloat16_compute_keeps_float32_masters(runs):
    half = runs.ranks[0]
    assert half["bf16_masters"] == {"torch.float32"}
    assert half["bf16_stats"]["actor/skipped"] == 0.0
    exact = runs.stats[0]["actor/grad_norm"]
    assert half["bf16_stats"]["actor/grad_norm"] == pytest.approx(exact, rel=0.1)
    # it moved as float32 does, in steps that bfloat16 weights could not hold
    moved = largest_gap(half["bf16_weights"], runs.before)
    assert moved == pytest.approx(largest_gap(runs.after_one_step, runs.before), rel=0.1)
    kept = next(iter(half["bf16_weights"].values()))
    assert not torch.equal(kept, kept.bfloat16().float())
