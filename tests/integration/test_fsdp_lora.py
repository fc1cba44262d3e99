"""Two Gloo processes train adapters as one does, with the base sharded and the reference theirs.

Float32: losses agree to 1e-5, adapters after three steps at lr 1e-2 to 2e-5.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from services.learner.trainer import FsdpTrainer
from tests.support.fsdp_ranks import CPU
from tests.support.lora_ranks import lora_job, stats_of
from tests.support.rank_processes import largest_gap, run_ranks
from tests.support.tiny_model import build_tiny_model


class Runs:
    """The one-rank run in this process and the two-rank run beside it."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        self.folder = folder
        self.model = build_tiny_model(folder / "model", seed=4)
        one = FsdpTrainer(self.model, lora_job(self.model), 0, 1, CPU)
        self.before = dict(one.weights())
        self.stats = stats_of(one, 0, 1)
        self.weights = dict(one.weights())
        save(one.state(), checkpoint_id=folder / "one", no_dist=True)
        one.export(folder / "export-one")
        self.ranks = run_ranks("tests.support.lora_ranks", folder, str(self.model), str(folder))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("fsdp"))


def test_two_ranks_train_the_adapters_that_one_does(runs):
    assert runs.ranks[0]["base_is_sharded"]
    assert runs.ranks[0]["stats"] == runs.ranks[1]["stats"]
    assert runs.ranks[1]["weights"] == {}
    assert largest_gap(runs.before, runs.ranks[0]["before"]) == 0.0
    for one, two in zip(runs.stats, runs.ranks[0]["stats"], strict=True):
        names = one.keys() - {"training/packed_tokens", "perf/model_tflop"}
        for name in names:
            assert two[name] == pytest.approx(one[name], abs=1e-5, rel=1e-3), name
    assert runs.stats[-1]["actor/kl_loss"] > 1e-4  # the reference is not the policy any more
    assert largest_gap(runs.before, runs.weights) > 1e-2
    assert largest_gap(runs.weights, runs.ranks[0]["weights"]) < 2e-5


def test_checkpoints_go_from_one_to_two_and_back(runs):
    from torch.distributed.checkpoint.state_dict_loader import load

    assert largest_gap(runs.ranks[0]["resumed"], runs.weights) == 0.0
    one = FsdpTrainer(runs.model, lora_job(runs.model), 0, 1, CPU)
    state = one.state()
    load(state, checkpoint_id=runs.folder / "two", no_dist=True)
    one.load_state(state)
    assert largest_gap(dict(one.weights()), runs.ranks[0]["weights"]) == 0.0


def test_two_ranks_export_what_one_does(runs):
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, two = (load_file(runs.folder / f / name) for f in ("export-one", "export"))
        assert largest_gap(one, two) < 1e-4


def test_bfloat16_with_a_narrow_base_and_checkpointed_activations(runs):
    half = runs.ranks[0]
    assert half["bf16_stats"] == runs.ranks[1]["bf16_stats"]
    assert set(half["bf16_dtypes"].values()) == {"torch.float32"}
    assert half["bf16_base"] == ["torch.bfloat16"]
    assert [stats["actor/skipped"] for stats in half["bf16_stats"]] == [0.0] * 3
    exact = runs.stats[0]["actor/grad_norm"]
    assert half["bf16_stats"][0]["actor/grad_norm"] == pytest.approx(exact, rel=0.15)
