"""Two Gloo processes that share layers by Megatron-core train as one rank of FSDP does.

Float32. Log-probs agree with the Hugging Face model's to 2e-5, gradients to 1e-4 of the largest
of their tensor, losses to 1e-5, weights after steps at lr 1e-3 to 2e-6. What is loaded,
published, saved and exported without a step in between is the same to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.learner.trainer import FsdpTrainer
from tests.support.families import build_family
from tests.support.fsdp_ranks import ALGORITHMS, LATE, batch
from tests.support.learning import job, padded_logprobs
from tests.support.megatron_ranks import (
    CPU,
    FAMILIES,
    copied,
    one_update,
    plain_settings,
)
from tests.support.rank_processes import largest_gap, run_ranks


def alone(model: Path, **changes: Any) -> FsdpTrainer:
    return FsdpTrainer(model, job(model, **(plain_settings() | changes)), 0, 1, CPU)


def same_stats(one: dict[str, float], two: dict[str, float], rel: float = 1e-3) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert two[name] == pytest.approx(one[name], abs=1e-5, rel=rel), name


class Runs:
    """The one-rank runs in this process and the two ranks beside them."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        self.folder = folder
        for seed, (name, (kind, changes)) in enumerate(FAMILIES.items()):
            build_family(folder / name, kind, seed=seed, **changes)
        one = alone(folder / "llama-odd")
        self.stats = [one.train_step(0, batch(0), LATE)]
        save(one.state(), checkpoint_id=folder / "one", no_dist=True)
        self.stats.append(one.train_step(1, batch(1), LATE))
        self.after_two_steps = copied(one)
        self.stats.append(one.train_step(2, batch(2), LATE))
        self.weights = copied(one)
        self.ranks = run_ranks("tests.support.megatron_ranks", folder, str(folder))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_come_back_under_their_names_to_the_bit(runs, name):
    published = runs.ranks[0]["families"][name]["before"]
    files = load_file(runs.folder / name / "model.safetensors")
    assert published.keys() == files.keys()
    assert ("lm_head.weight" in published) == (not FAMILIES[name][1]["tie_word_embeddings"])
    for tensor in published:
        assert torch.equal(published[tensor], files[tensor]), tensor
    assert runs.ranks[1]["families"][name]["before"] == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_the_hugging_face_model_s(runs, name):
    lm = AutoModelForCausalLM.from_pretrained(runs.folder / name, dtype=torch.float32)
    pairs = [(g.ticket.prompt_ids, c.token_ids) for g in batch(0) for c in g.completions]
    with torch.no_grad():
        expected = padded_logprobs(lm, pairs)
    ours = [rank["families"][name]["logprobs"] for rank in runs.ranks]
    assert torch.equal(*ours)
    assert float((ours[0] - expected).abs().max()) < 2e-5
    assert float(expected.std()) > 0.5  # far from a uniform distribution


@pytest.mark.parametrize("name", FAMILIES)
def test_one_update_has_fsdp_s_gradient_and_weights(runs, name):
    plain = one_update(alone(runs.folder / name, actor__ppo_mini_batch_size=4))
    ours = runs.ranks[0]["families"][name]["update"]
    same_stats(plain["stats"], ours["stats"])
    assert ours["stats"] == runs.ranks[1]["families"][name]["update"]["stats"]
    assert ours["moments"].keys() == plain["moments"].keys()
    for tensor, expected in plain["moments"].items():
        largest = float(expected.abs().max())
        assert largest > 0, tensor
        gap = float((ours["moments"][tensor] - expected).abs().max())
        assert gap < 1e-4 * largest, tensor
    assert largest_gap(plain["weights"], ours["weights"]) < 2e-6
    before = load_file(runs.folder / name / "model.safetensors")
    assert largest_gap(before, ours["weights"]) > 5e-4


def test_steps_agree_with_one_rank_s(runs):
    """Step 1 has a mini-batch without gradient, step 2 one that is not finite and is skipped."""
    first, second = (rank["steps"] for rank in runs.ranks)
    assert first["stats"] == second["stats"]
    assert first["digest"] == second["digest"] != ""
    assert [stats["actor/skipped"] for stats in first["stats"]] == [0.0, 0.0, 1.0]
    for one, two in zip(runs.stats, first["stats"], strict=True):
        same_stats(one, two)
    assert largest_gap(runs.weights, first["weights"]) < 2e-6


def test_fsdp_loads_what_megatron_saved(runs):
    from torch.distributed.checkpoint.state_dict_loader import load

    one = alone(runs.folder / "llama-odd")
    state = one.state()
    load(state, checkpoint_id=runs.folder / "two", no_dist=True)
    one.load_state(state)
    assert largest_gap(copied(one), runs.ranks[0]["steps"]["weights"]) == 0.0
    assert {float(n) for n in one.state()["updates"].values()} == {5.0}


def test_megatron_loads_what_fsdp_saved_and_goes_on(runs):
    seen = runs.ranks[0]["steps"]
    assert largest_gap(seen["resumed_weights"], runs.after_two_steps) < 2e-6
    same_stats(runs.stats[1], seen["resumed"])


def test_another_tensor_parallel_size_loads_it_and_ranks_share_groups(runs):
    from torch.distributed.checkpoint.state_dict_loader import load

    seen = runs.ranks[0]["steps"]
    assert largest_gap(seen["spread_loaded"], seen["weights"]) == 0.0
    assert seen["spread"] == runs.ranks[1]["steps"]["spread"]
    one = alone(runs.folder / "llama-odd")
    state = one.state()
    load(state, checkpoint_id=runs.folder / "two", no_dist=True)
    one.load_state(state)
    expected = one.train_step(3, batch(1), LATE)
    # rows are packed rank by rank, so shared prefixes may be run twice
    packed = ("training/packed_tokens", "perf/model_tflop")
    expected, spread = (
        {k: v for k, v in stats.items() if k not in packed} for stats in (expected, seen["spread"])
    )
    same_stats(expected, spread)
    assert largest_gap(copied(one), seen["spread_weights"]) < 2e-6


def test_export_loads_in_transformers(runs):
    lm = AutoModelForCausalLM.from_pretrained(runs.folder / "export", dtype=torch.float32)
    named = {name: p.detach() for name, p in lm.named_parameters()}
    assert largest_gap(named, runs.ranks[0]["steps"]["weights"]) == 0.0


def test_an_objective_with_a_reference_an_entropy_and_whole_completions(runs):
    seen = runs.ranks[0]["variants"]["algorithm"]
    plain = alone(runs.folder / "qwen2", **ALGORITHMS["whole completions"])
    for step, stats in enumerate(seen):
        expected = plain.train_step(step, batch(step), LATE)
        same_stats(expected, stats)
        assert expected["actor/grad_norm"] > 0
    assert seen[1]["actor/kl_loss"] > 0


def test_gradient_checkpointing_changes_no_bit(runs):
    seen = runs.ranks[0]["variants"]
    assert seen["checkpointing"] == seen["plain"]
    assert largest_gap(seen["checkpointing weights"], seen["plain weights"]) == 0.0


def test_bfloat16_compute_keeps_float32_masters(runs):
    seen = runs.ranks[0]["variants"]
    assert seen["half masters"] == {"torch.float32"}
    assert seen["half"]["actor/skipped"] == 0.0
    exact = seen["plain"][0]["actor/grad_norm"]
    assert seen["half"]["actor/grad_norm"] == pytest.approx(exact, rel=0.1)
    before = load_file(runs.folder / "qwen2" / "model.safetensors")
    kept = seen["half weights"]["model.layers.0.mlp.up_proj.weight"]
    assert 1e-4 < largest_gap(before, seen["half weights"]) < 1e-2
    assert not torch.equal(kept, kept.bfloat16().float())
