"""Packed rows give the padded batch's gradient however they are cut and whoever is beside whom.

All float32: log-probs agree to 1e-4 and gradients to 1e-4 of the largest entry. The families of
models have a file of their own (test_model_families.py).
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from headway.rl.packing import Sample, pack
from services.learner import attention
from services.learner.attention_blocks import BlockPlan
from tests.support.learning import random_groups
from tests.support.packed import CPU, SMALL, close, packed, policy_of, samples_of

LLAMA = LlamaConfig(**SMALL, tie_word_embeddings=True)


def test_row_length_and_order_do_not_change_the_gradient(monkeypatch):
    policy, samples = policy_of(LLAMA), samples_of()
    lengths = [len(s.completion) for s in samples]
    slopes = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(3))
    logprobs, whole = packed(policy, samples, slopes, row_tokens=1000)
    for row_tokens in (1, 17, 60):
        again, gradient = packed(policy, samples, slopes, row_tokens)
        assert torch.allclose(again, logprobs, atol=1e-4)
        close(gradient, whole)
    backwards = torch.cat(list(reversed(slopes.split(lengths))))
    close(packed(policy, samples[::-1], backwards, row_tokens=60)[1], whole)
    monkeypatch.setattr(BlockPlan.__init__, "__defaults__", (5,))  # attention in runs of 5 tokens
    close(packed(policy, samples, slopes, row_tokens=1000)[1], whole)


@pytest.mark.parametrize("block_tokens", [128, 7])
def test_groups_in_a_row_do_not_touch_each_other(monkeypatch, block_tokens):
    """A group's log-probs and gradient are the same alone and between any neighbours."""
    monkeypatch.setattr(BlockPlan.__init__, "__defaults__", (block_tokens,))
    policy = policy_of(LLAMA)
    groups = random_groups(4, 4, vocabulary=96, seed=4)
    samples = [[Sample(g.ticket.prompt_ids, c.token_ids) for c in g.completions] for g in groups]
    one = samples[1]
    own = torch.randn(
        sum(len(s.completion) for s in one), generator=torch.Generator().manual_seed(5)
    )
    logprobs, gradient = packed(policy, one, own, row_tokens=1000)
    for others in ([samples[0]], [samples[2]], [samples[0], samples[2], samples[3]]):
        beside = [s for group in others for s in group]
        assert len(pack(one + beside, 1000)) == 1
        nothing = torch.zeros(sum(len(s.completion) for s in beside))
        found, mixed = packed(policy, one + beside, torch.cat([own, nothing]), row_tokens=1000)
        assert torch.allclose(found[: len(own)], logprobs, atol=1e-5)
        close(mixed, gradient)


def test_gradient_checkpointing_changes_nothing():
    policy, samples = policy_of(LLAMA), samples_of()
    slopes = torch.ones(sum(len(s.completion) for s in samples))
    plain = packed(policy, samples, slopes, row_tokens=60)[1]
    policy.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    close(packed(policy, samples, slopes, row_tokens=60)[1], plain)


def test_temperature_is_the_sampler_s():
    policy, samples = policy_of(LLAMA), [Sample((1, 2), (3,))]
    logprobs, _ = packed(policy, samples, torch.ones(1), 100, temperature=0.5)
    with torch.no_grad():
        logits = policy.lm(input_ids=torch.tensor([[1, 2]]), tree=_plain(2)).logits[0, -1]
    assert float(logprobs[0]) == pytest.approx(float((logits / 0.5).log_softmax(0)[3]), abs=1e-5)


def _plain(length: int) -> attention.Plan:
    (row,) = pack([Sample(tuple(range(length)), (0,))], 100)
    return attention.plan(row, CPU)


def test_dropout_is_off():
    policy, samples = policy_of(LlamaConfig(**SMALL, attention_dropout=0.5)), samples_of()
    slopes = torch.ones(sum(len(s.completion) for s in samples))
    assert torch.equal(
        packed(policy, samples, slopes, 60)[0], packed(policy, samples, slopes, 60)[0]
    )
