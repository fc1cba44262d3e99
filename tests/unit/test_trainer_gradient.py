"""Packed rows give the padded batch's loss and gradient, on several architectures.

All float32: log-probs agree to 1e-4 and gradients to 1e-4 of the largest entry.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from headway.errors import InvalidSpec
from headway.rl.packing import Sample, pack
from services.learner import attention
from services.learner.model import DeviceRow, Policy, prepare
from tests.support.learning import padded_logprobs, random_groups

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
}


def policy_of(config: Any) -> Policy:
    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, attention.tree_attention)
    torch.manual_seed(0)
    return prepare(
        AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention.NAME
        )
    )


def samples_of(seed: int = 1) -> list[Sample]:
    groups = random_groups(3, 4, vocabulary=96, seed=seed)
    return [Sample(g.ticket.prompt_ids, c.token_ids) for g in groups for c in g.completions]


def gradients(policy: Policy) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in policy.lm.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


def packed(
    policy: Policy, samples: list[Sample], slopes: Tensor, row_tokens: int, temperature: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """log π of all tokens and the gradient of Σ slope · log π."""
    logprobs = torch.zeros(len(slopes))
    for row in pack(samples, row_tokens):
        placed = DeviceRow.of(row, CPU)
        out = policy(placed, temperature, lambda lp, s, f=placed.flat: (slopes[f[s]] * lp).sum())
        out.loss.backward()
        logprobs[placed.flat] = out.logprobs
    return logprobs, gradients(policy)


def close(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    largest = max(float(g.abs().max()) for g in other.values())
    for name, gradient in other.items():
        gap = float((mine[name] - gradient).abs().max())
        assert gap < 1e-4 * largest, (name, gap, largest)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_gradient_equals_padded(name):
    policy, samples = policy_of(CONFIGS[name]), samples_of()
    total = sum(len(s.completion) for s in samples)
    slopes = torch.randn(total, generator=torch.Generator().manual_seed(2))
    logprobs, mine = packed(policy, samples, slopes, row_tokens=1000)
    reference = padded_logprobs(policy.lm, [(s.prompt, s.completion) for s in samples])
    (slopes * reference).sum().backward()
    assert torch.allclose(logprobs, reference, atol=1e-4)
    close(mine, gradients(policy))
    assert logprobs.std() > 0.5  # a flat distribution would hide mistakes


def test_row_length_and_order_do_not_change_the_gradient(monkeypatch):
    policy, samples = policy_of(CONFIGS["llama-tied"]), samples_of()
    lengths = [len(s.completion) for s in samples]
    slopes = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(3))
    logprobs, whole = packed(policy, samples, slopes, row_tokens=1000)
    for row_tokens in (1, 17, 60):
        again, gradient = packed(policy, samples, slopes, row_tokens)
        assert torch.allclose(again, logprobs, atol=1e-4)
        close(gradient, whole)
    backwards = torch.cat(list(reversed(slopes.split(lengths))))
    close(packed(policy, samples[::-1], backwards, row_tokens=60)[1], whole)
    monkeypatch.setattr(attention.layout, "__defaults__", (5,))  # attention in runs of 5 tokens
    close(packed(policy, samples, slopes, row_tokens=1000)[1], whole)


def test_gradient_checkpointing_changes_nothing():
    policy, samples = policy_of(CONFIGS["llama-tied"]), samples_of()
    slopes = torch.ones(sum(len(s.completion) for s in samples))
    plain = packed(policy, samples, slopes, row_tokens=60)[1]
    policy.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    close(packed(policy, samples, slopes, row_tokens=60)[1], plain)


def test_temperature_is_the_sampler_s():
    policy, samples = policy_of(CONFIGS["llama-tied"]), [Sample((1, 2), (3,))]
    logprobs, _ = packed(policy, samples, torch.ones(1), 100, temperature=0.5)
    with torch.no_grad():
        logits = policy.lm(input_ids=torch.tensor([[1, 2]]), tree=_plain(2)).logits[0, -1]
    assert float(logprobs[0]) == pytest.approx(float((logits / 0.5).log_softmax(0)[3]), abs=1e-5)


def _plain(length: int) -> attention.Layout:
    (row,) = pack([Sample(tuple(range(length)), (0,))], 100)
    return attention.layout(row, CPU)


def test_dropout_is_off():
    config = LlamaConfig(**SMALL, attention_dropout=0.5)
    policy, samples = policy_of(config), samples_of()
    slopes = torch.ones(sum(len(s.completion) for s in samples))
    assert torch.equal(
        packed(policy, samples, slopes, 60)[0], packed(policy, samples, slopes, 60)[0]
    )


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            Gemma2Config(**SMALL, head_dim=16, attn_logit_softcapping=None),
            "Gemma2ForCausalLM cannot run packed rows: its logits differ",  # a capped head
        ),
        (Gemma2Config(**SMALL, head_dim=16), "soft-capping"),
        (
            BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2),
            "BloomForCausalLM cannot run packed rows: its logits differ",  # ignores positions
        ),
        (MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=4), "Mamba"),
    ],
    ids=["capped-head", "capped-attention", "own-attention", "no-attention"],
)
def test_architectures_that_cannot_run_packed_rows_are_refused(config, complaint):
    with pytest.raises(InvalidSpec, match=complaint):
        policy_of(config)


@pytest.mark.parametrize(
    "config",
    [
        GemmaConfig(**SMALL, head_dim=16),  # scales embeddings inside its base model
        GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=32),
    ],
    ids=["gemma", "gpt2"],
)
def test_other_architectures_pass_the_comparison(config):
    policy_of(config)


def test_a_sequence_beyond_the_attention_window_is_refused():
    policy = policy_of(MistralConfig(**SMALL, sliding_window=8))
    logprobs, _ = packed(policy, [Sample((1, 2), (3, 4))], torch.ones(2), 100)
    assert torch.isfinite(logprobs).all()
    with pytest.raises(InvalidSpec, match="max_model_len to at most 8"):
        packed(policy, [Sample(tuple(range(9)), (3,))], torch.ones(1), 100)
