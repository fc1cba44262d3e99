"""Each family of models, tied and untied: packed rows, padded batches and saved folders agree.

Float32: log-probs agree to 1e-4 and gradients to 1e-4 of the largest entry with the model's own
eager forward pass on a right-padded batch. Windows are 5 tokens, shorter than most sequences;
attention scores and logits are capped where the family caps them, low enough to be felt.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from headway.errors import InvalidSpec
from services.learner.model import load_policy
from tests.support.learning import job, padded_logprobs
from tests.support.packed import SMALL, close, gradients, packed, policy_of, samples_of

SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-window": (Qwen2Config, {**SLIDING, "use_sliding_window": True}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "gemma": (GemmaConfig, {"head_dim": 16}),
    "gemma2": (
        Gemma2Config,
        {
            **SLIDING,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (Gemma3TextConfig, {**SLIDING, "head_dim": 16, "query_pre_attn_scalar": 24}),
    "mistral": (MistralConfig, {"sliding_window": 5}),
    "mistral-full": (MistralConfig, {"sliding_window": None}),
}


def config_of(family: str, **changes: Any) -> Any:
    kind, settings = FAMILIES[family]
    return kind(**SMALL, **settings, **changes)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_the_padded_batch(family, tied):
    policy, samples = policy_of(config_of(family, tie_word_embeddings=tied)), samples_of()
    total = sum(len(s.completion) for s in samples)
    slopes = torch.randn(total, generator=torch.Generator().manual_seed(2))
    reference = padded_logprobs(policy.lm, [(s.prompt, s.completion) for s in samples])
    (slopes * reference).sum().backward()
    expected = gradients(policy)
    for row_tokens in (1000, 30):
        logprobs, mine = packed(policy, samples, slopes, row_tokens)
        assert torch.allclose(logprobs, reference, atol=1e-4)
        close(mine, expected)
    assert reference.std() > 0.5  # a flat distribution would hide mistakes


@pytest.mark.parametrize("family", ["qwen2-window", "gemma2", "gemma3", "mistral"])
def test_what_sets_a_family_apart_is_felt(family):
    """Without its window or its caps the model says something else: the test above sees them."""
    samples = samples_of()
    pairs = [(s.prompt, s.completion) for s in samples]
    with torch.no_grad():
        found = padded_logprobs(policy_of(config_of(family)).lm, pairs)
        for name in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
            config = config_of(family)
            if getattr(config, name, None) is None:
                continue
            setattr(config, name, type(getattr(config, name))(1000))
            other = padded_logprobs(policy_of(config).lm, pairs)
            assert (found - other).abs().max() > 0.01, name


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3"])
def test_a_saved_model_loads_in_transformers_again(family, tmp_path):
    from headway.weights.manifest import digest_of, tensor_bytes
    from services.learner.trainer import FsdpTrainer
    from tests.support.learning import random_groups

    source = tmp_path / "source"
    policy_of(config_of(family)).lm.save_pretrained(source)
    trainer = FsdpTrainer(source, job(source), 0, 1, torch.device("cpu"))
    groups = random_groups(4, 4, vocabulary=96)
    assert trainer.train_step(0, groups)["actor/skipped"] == 0
    trainer.export(tmp_path / "export")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    kept = {name: digest_of(tensor_bytes(p.detach())) for name, p in lm.named_parameters()}
    trained = {name: digest_of(tensor_bytes(p)) for name, p in trainer.weights()}
    assert kept == trained
    assert load_policy(tmp_path / "export").lm.config.model_type == lm.config.model_type


SSM = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (MambaConfig(**SSM, state_size=4), "MambaForCausalLM has layers of kind linear_attention"),
        (
            JambaConfig(
                **SMALL, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_d_state=4
            ),
            "JambaForCausalLM has layers of kind",
        ),
        (
            BartConfig(
                vocab_size=96,
                d_model=32,
                decoder_layers=1,
                decoder_attention_heads=2,
                decoder_ffn_dim=32,
                is_decoder=True,
            ),
            "BartForCausalLM is an encoder-decoder model|BartForCausalLM cannot run packed rows",
        ),
        (
            BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2),
            "BloomForCausalLM cannot run packed rows: its logits differ",  # ignores positions
        ),
        (
            Llama4TextConfig(
                **SMALL, head_dim=16, intermediate_size_mlp=64, num_local_experts=2, moe_layers=[]
            ),
            "Llama4ForCausalLM has layers of kind chunked_attention",
        ),
        (
            GptOssConfig(**SMALL, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
            r"attention sinks or biases \(s_aux\)",
        ),
        (
            Gemma3TextConfig(**SMALL, head_dim=16, use_bidirectional_attention=True),
            "Gemma3ForCausalLM cannot run packed rows: its logits differ",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_other_kinds_are_refused_by_name(config, complaint):
    with pytest.raises(InvalidSpec, match=complaint):
        policy_of(config)


def test_an_encoder_decoder_folder_is_refused_by_name(tmp_path):
    T5Config(vocab_size=96, d_model=32).save_pretrained(tmp_path)
    with pytest.raises(InvalidSpec, match=r"T5Config"):
        load_policy(tmp_path)


def test_a_window_that_only_the_model_s_mask_knows_is_refused(monkeypatch):
    """An attention that is not told of its window would look too far."""
    from transformers.models.mistral import modeling_mistral

    plain = modeling_mistral.MistralAttention.forward

    def untold(self, *args: Any, **kwargs: Any) -> Any:
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.config.sliding_window = window

    monkeypatch.setattr(modeling_mistral.MistralAttention, "forward", untold)
    with pytest.raises(InvalidSpec, match="MistralForCausalLM cannot run packed rows"):
        policy_of(MistralConfig(**SMALL, sliding_window=4096))


def test_other_architectures_pass_the_comparison():
    policy_of(GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=32))
