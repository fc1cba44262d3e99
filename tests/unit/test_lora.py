"""LoRA on one rank, against peft's own model on a padded batch, and what leaves the trainer.

All float32 unless said: log-probs agree to 1e-4, gradients to 1e-4 of the largest entry.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headway.errors import InvalidSpec
from headway.jobspec import parse_job
from services.learner.trainer import FsdpTrainer
from tests.support.learning import job, padded_logprobs, random_groups
from tests.support.plain_step import plain_step
from tests.support.tiny_model import build_tiny_model
from tests.support.trainers import same, trainer, weights

RANK, ALPHA = 4, 8.0
LORA: dict[str, Any] = {"model__lora_rank": RANK, "model__lora_alpha": ALPHA}
# large Adam eps: entries whose gradient is rounding noise must not move by it
CALM: dict[str, Any] = {"actor__optim__eps": 1e-4, "actor__optim__lr": 1e-2}
LAYERS = 2
# q 128x64, k and v 64x64, o 64x128, gate and up 128x64, down 64x128: rank x (in + out)
NUM_ADAPTERS = LAYERS * RANK * (192 + 128 + 128 + 192 + 192 + 192 + 192)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def peft_like(t: FsdpTrainer, folder: Path, targets: list[str] | str = "all-linear") -> Any:
    """peft's own model around the same base, with the trainer's adapters."""
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    wrapped = get_peft_model(loaded(folder), config)
    with torch.no_grad():
        for name, parameter in trained(wrapped).items():
            parameter.copy_(weights(t)[name])
    return wrapped


def trained(wrapped: Any) -> dict[str, Tensor]:
    """A peft model's adapters by the names under which they are published."""
    return {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }


def moved(folder: Path, steps: int = 2, **changes: Any) -> FsdpTrainer:
    """A trainer whose adapters are no longer as they began."""
    t = trainer(folder, **LORA, **CALM, **changes)
    for step in range(steps):
        t.train_step(step, random_groups(4, 4, seed=30 + step), frozenset(range(4)))
    return t


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=str)
def test_steps_equal_peft_s_own_on_a_padded_batch(model, targets):
    changes = {**LORA, **CALM, "model__target_modules": targets}
    t = trainer(model, **changes)
    spec = job(model, **changes)
    plain = peft_like(t, model, targets)
    adapters = trained(plain)
    assert weights(t).keys() == adapters.keys()
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    for step in range(3):
        groups = random_groups(4, 4, seed=step)
        stats = t.train_step(step, groups, frozenset(range(4)))
        expected = plain_step(plain, groups, spec)
        expected.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert stats["actor/pg_loss"] == pytest.approx(expected.pg_loss, abs=1e-5)
        assert stats["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    for name, tensor in weights(t).items():
        assert float((tensor - adapters[name].detach()).abs().max()) < 2e-5, name
        assert float(tensor.abs().max()) > 1e-3, name  # B began as zero


def test_only_adapters_are_trained_published_and_kept(model):
    t = trainer(model, **LORA)
    base = {n: p.detach().clone() for n, p in t.policy.lm.named_parameters() if "lora" not in n}
    staged = weights(t)
    assert sum(tensor.numel() for tensor in staged.values()) == NUM_ADAPTERS
    assert {name.partition(".lora_")[2] for name in staged} == {"A.weight", "B.weight"}
    state = t.state()
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        assert sum(tensor.numel() for tensor in state[kind].values()) == NUM_ADAPTERS
    t.train_step(0, random_groups(4, 4))
    t.train_step(1, random_groups(4, 4, seed=1), frozenset(range(4)))
    after = {n: p for n, p in t.policy.lm.named_parameters() if "lora" not in n}
    assert same(base, after)
    assert not any(p.requires_grad for p in after.values())
    assert not any(torch.equal(tensor, staged[name]) for name, tensor in weights(t).items())


def test_adapters_begin_as_nothing_by_the_job_s_seed(model):
    first, again = weights(trainer(model, **LORA)), weights(trainer(model, **LORA))
    other = weights(trainer(model, **LORA, seed=1))
    assert same(first, again)
    for name, tensor in first.items():
        if ".lora_B." in name:
            assert not tensor.any()
        else:
            assert tensor.any() and not torch.equal(tensor, other[name])


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_reference_is_the_base_without_adapters(model, where):
    kl = {"actor__use_kl_loss": True} if where == "loss" else {"algorithm__use_kl_in_reward": True}
    t = moved(model, **kl)
    plain, groups = peft_like(t, model), random_groups(4, 4, seed=9)
    pairs = [(g.ticket.prompt_ids, c.token_ids) for g in groups for c in g.completions]
    with torch.no_grad():
        base = padded_logprobs(loaded(model), pairs)
        policy = padded_logprobs(plain, pairs)
    stats = t.train_step(2, groups, frozenset(range(4)))
    if where == "loss":
        expected = plain_step(plain, groups, job(model, **LORA, **kl), ref_logprobs=base)
        assert expected.kl_loss > 1e-3
        assert stats["actor/kl_loss"] == pytest.approx(expected.kl_loss, rel=1e-3)
    else:
        sizes = [len(c.token_ids) for g in groups for c in g.completions]
        means = [float(d.mean()) for d in (policy - base).split(sizes)]
        expected_mean = sum(means) / len(means)
        assert abs(expected_mean) > 1e-3
        assert stats["actor/reward_kl_penalty"] == pytest.approx(expected_mean, rel=1e-3)


def test_a_resumed_run_has_the_same_bits(model, tmp_path):
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    steps, late = [random_groups(2, 4, seed=s) for s in range(4)], frozenset({0, 1})
    t = trainer(model, **LORA, actor__use_kl_loss=True)
    for s in (0, 1):
        t.train_step(s, steps[s], late)
    save(t.state(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    resumed = trainer(model, **LORA, actor__use_kl_loss=True, seed=5)
    state = resumed.state()
    load(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    resumed.load_state(state)
    assert resumed.digest() == t.digest()
    for s in (2, 3):
        assert resumed.train_step(s, steps[s], late) == t.train_step(s, steps[s], late)
    assert same(weights(resumed), weights(t)) and resumed.digest() == t.digest()
    with pytest.raises(InvalidSpec, match="another model"):
        trainer(model).load_state(t.state())


def test_bfloat16_keeps_a_narrow_base_and_float32_adapters(model):
    half, exact = moved(model, 1, actor__compute_dtype="bfloat16"), moved(model, 1)
    assert {p.dtype for p in half.policy.parameters()} == {torch.bfloat16}
    masters = half.state()["model"]
    assert sum(m.numel() for m in masters.values()) == NUM_ADAPTERS
    for name, narrow in half.policy.lm.named_parameters():
        if narrow.requires_grad:
            assert masters[name].dtype == torch.float32
            assert torch.equal(narrow, masters[name].bfloat16())
    b = [name for name in weights(half) if ".lora_B." in name]
    one, other = (torch.cat([weights(t)[n].flatten() for n in b]) for t in (half, exact))
    assert float(torch.nn.functional.cosine_similarity(one, other, dim=0)) > 0.95


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_merged_export_computes_what_the_adapters_do(tmp_path, tied):
    source = build_tiny_model(tmp_path / "base", seed=5, tie_embeddings=tied)
    t = moved(source)
    target = tmp_path / "run" / "model"
    t.export(target)
    t.export(target)  # replaces
    ids = torch.randint(0, 320, (3, 12), generator=torch.Generator().manual_seed(0))
    wrapped = peft_like(t, source)
    with torch.no_grad():
        adapted = wrapped(ids).logits
        merged = loaded(target)(ids).logits
        alone = PeftModel.from_pretrained(loaded(source), target / "adapter")(ids).logits
        base = loaded(source)(ids).logits
    assert float((merged - adapted).abs().max()) < 1e-4 * float(adapted.abs().max())
    assert float((alone - adapted).abs().max()) < 1e-5 * float(adapted.abs().max())
    assert float((base - adapted).abs().max()) > 1e-2 * float(adapted.abs().max())
    before, after = (load_file(f / "model.safetensors") for f in (source, target))
    assert before.keys() == after.keys()
    touched = {name for name in before if "_proj." in name}
    for name in before:
        assert torch.equal(before[name], after[name]) == (name not in touched), name
    config = json.loads((target / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert [p.name for p in target.parent.iterdir()] == ["model"]


def test_a_bfloat16_base_stays_bfloat16(tmp_path):
    source = build_tiny_model(tmp_path / "base", seed=5, dtype="bfloat16")
    moved(source).export(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    adapters = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapters.values()} == {torch.float32}


def test_work_that_a_frozen_weight_spares_is_not_counted(model):
    groups = random_groups(2, 4)
    all_weights = trainer(model).train_step(0, groups)["perf/model_tflop"]
    adapters = trainer(model, **LORA).train_step(0, groups)["perf/model_tflop"]
    assert 2 / 3 * all_weights < adapters < 0.9 * all_weights


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_prj"], r"q_prj is no linear layer of LlamaForCausalLM .*did you mean q_proj\?"),
        (["q_proj", "lm_head"], "lm_head is no linear layer"),
        (["embed_tokens"], "embed_tokens is no linear layer"),
        (["self_attn"], "self_attn is no linear layer"),
    ],
)
def test_layers_that_cannot_have_adapters_are_named(model, targets, words):
    with pytest.raises(InvalidSpec, match=words):
        trainer(model, **LORA, model__target_modules=targets)


def test_targets_may_be_whole_names(model):
    name = "model.layers.1.self_attn.v_proj"
    t = trainer(model, **LORA, model__target_modules=[name, "layers.0.mlp.up_proj"])
    assert {n.partition(".lora_")[0] for n in weights(t)} == {name, "model.layers.0.mlp.up_proj"}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"lora_dropout": 0.1, "lora_rank": 4}, "lora_dropout 0.1 is not possible"),
        ({"lora_alpha": 32}, "lora_alpha is set and lora_rank is 0"),
        ({"target_modules": ["q_proj"]}, "target_modules is set and lora_rank is 0"),
        ({"lora_rank": 4, "target_modules": []}, "target_modules is empty"),
        ({"lora_rank": 4, "target_modules": ["all-linear", "q_proj"]}, "all-linear has every"),
        ({"lora_rnk": 4}, "did you mean model.lora_rank"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(section, words):
    raw = job(Path("x")).model_dump(mode="json")
    raw["model"].update(section)
    with pytest.raises(InvalidSpec, match=words):
        parse_job(raw)
    with pytest.raises(InvalidSpec, match=r"model\.lora_rank 4 needs actor\.strategy fsdp"):
        job(Path("x"), **LORA, actor__strategy="megatron")
    with pytest.raises(InvalidSpec, match=r"model\.lora_rank 4 is not possible with .* gae"):
        job(Path("x"), **LORA, algorithm__adv_estimator="gae")
    spec = job(Path("x"), **LORA, model__target_modules="q_proj")
    assert spec.model.target_modules == ("q_proj",) and spec.model.lora_scale == 2.0
    assert parse_job(spec.model_dump(mode="json")) == spec
