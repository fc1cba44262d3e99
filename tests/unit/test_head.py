"""The chunked head against log_softmax on whole logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from services.learner import head as head_module
from services.learner import softmax as softmax_module
from services.learner.head import Targets, chunk_rows, policy_head

S, D, V, T = 7, 5, 11, 10
SOURCE_OF = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5, 6, 6])
TARGETS = Targets(SOURCE_OF, torch.tensor([1, 4, 2, 2, 2, 10, 0, 3, 7, 8]))
SLOPES = torch.linspace(-1.0, 1.0, T)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    make = [torch.randn(shape, generator=generator) for shape in ((S, D), (V, D), (V,))]
    hidden, weight, bias = (x.to(dtype).requires_grad_(True) for x in make)
    return hidden, weight, bias


def loss_of(logprobs: Tensor, part: slice) -> Tensor:
    """Not linear, so that a wrong gradient cannot hide."""
    return (SLOPES[part] * logprobs.exp() + 0.1 * logprobs.square()).sum()


def reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits / temperature
    logs = logits.log_softmax(dim=1)
    entropy = -(logs.exp() * logs).sum(dim=1)[SOURCE_OF]
    logprobs = logs[SOURCE_OF, TARGETS.tokens]
    return loss_of(logprobs, slice(None)), logprobs, entropy


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_equal_whole_logits(monkeypatch, chunk, with_bias):
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * V * chunk)
    assert chunk_rows(V) == chunk
    ours, theirs = tensors(), tensors()
    out = policy_head(ours[0], ours[1], ours[2] if with_bias else None, TARGETS, 0.7, loss_of)
    loss, logprobs, entropy = reference(
        theirs[0], theirs[1], theirs[2] if with_bias else None, temperature=0.7
    )
    (3.0 * out.loss).backward()  # type: ignore[no-untyped-call]
    (3.0 * loss).backward()
    assert float(out.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert torch.allclose(out.logprobs, logprobs, atol=1e-6)
    assert torch.allclose(out.entropy, entropy, atol=1e-6)
    for mine, other in list(zip(ours, theirs, strict=True))[: 3 if with_bias else 2]:
        assert torch.allclose(mine.grad, other.grad, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_entropy_bonus_and_its_gradient(monkeypatch, chunk):
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * V * chunk)
    bonus = torch.linspace(0.0, 2.0, T)
    ours, theirs = tensors(), tensors()
    out = policy_head(*ours, TARGETS, 0.7, loss_of, bonus)
    loss, _, entropy = reference(*theirs, temperature=0.7)
    loss = loss - (bonus * entropy).sum()
    (3.0 * out.loss).backward()  # type: ignore[no-untyped-call]
    (3.0 * loss).backward()
    assert float(out.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-4)


@pytest.mark.parametrize("with_bonus", [True, False])
def test_capped_logits_and_their_gradient(monkeypatch, with_bonus):
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * V * 3)
    monkeypatch.setattr(softmax_module, "CACHE_BYTES", 4 * V * 2)
    bonus = torch.linspace(0.0, 2.0, T) if with_bonus else None
    ours, theirs = tensors(), tensors()
    out = policy_head(*ours, TARGETS, 0.7, loss_of, bonus, cap=1.5)
    loss, logprobs, entropy = reference(*theirs, temperature=0.7, cap=1.5)
    if bonus is not None:
        loss = loss - (bonus * entropy).sum()
    out.loss.backward()  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(out.logprobs, logprobs, atol=1e-6)
    assert torch.allclose(out.entropy, entropy, atol=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-5)
    free = reference(*tensors(), temperature=0.7)[1]
    assert (free - logprobs).abs().max() > 0.1  # the cap is felt


def test_a_near_certain_token_keeps_its_entropy_and_its_gradient():
    """p = 1 - 1e-6: both are tiny, and neither is lost in rounding of the large logit."""
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[40.0], [40.0 - math.log(1e6)]], requires_grad=True)
    targets = Targets(torch.tensor([0]), torch.tensor([0]))
    out = policy_head(hidden, weight, None, targets, 1.0, lambda lp, _: lp.sum())
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert float(out.entropy) == pytest.approx(1e-6 * (1 + math.log(1e6)), abs=3e-6)
    assert float(out.entropy) >= 0
    assert weight.grad is not None
    assert weight.grad[1].item() == pytest.approx(-1e-6, rel=0.3)


def test_uniform_logits_by_hand():
    # weight 0: p = 1/11 everywhere; d loss / d bias_v = Σ_t (onehot - 1/11) for loss = Σ log p
    hidden, weight = torch.ones(1, D), torch.zeros(V, D)
    bias = torch.zeros(V, requires_grad=True)
    targets = Targets(torch.tensor([0, 0]), torch.tensor([3, 3]))
    out = policy_head(hidden, weight, bias, targets, 1.0, lambda lp, _: lp.sum())
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert out.logprobs.tolist() == pytest.approx([-math.log(11)] * 2)
    assert out.entropy.tolist() == pytest.approx([math.log(11)] * 2)
    expected = torch.full((V,), -2 / 11)
    expected[3] += 2
    assert bias.grad is not None
    assert bias.grad.tolist() == pytest.approx(expected.tolist())


def test_temperature_divides_logits_and_gradients():
    hidden = torch.ones(1, 1)
    weight = torch.tensor([[0.0], [2.0]], requires_grad=True)
    targets = Targets(torch.tensor([0]), torch.tensor([1]))
    out = policy_head(hidden, weight, None, targets, 2.0, lambda lp, _: lp.sum())
    out.loss.backward()  # type: ignore[no-untyped-call]
    p = 1 / (1 + math.exp(-1.0))
    assert out.logprobs.tolist() == pytest.approx([math.log(p)])
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([-(1 - p) / 2, (1 - p) / 2])


def test_bfloat16_weights_add_up_in_float32(monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * V * 2)
    hidden, weight, _ = tensors(torch.bfloat16)
    out = policy_head(hidden, weight, None, TARGETS, 1.0, loss_of)
    out.loss.backward()  # type: ignore[no-untyped-call]
    exact, exact_weight = hidden.detach().float(), weight.detach().float().requires_grad_(True)
    reference(exact, exact_weight, None, 1.0)[0].backward()
    assert out.logprobs.dtype == torch.float32 and weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert exact_weight.grad is not None
    gap = (weight.grad.float() - exact_weight.grad).abs().max()
    assert float(gap) < 0.02 * float(exact_weight.grad.abs().max())


def test_without_gradients_nothing_is_kept():
    hidden, weight, bias = tensors()
    with torch.no_grad():
        out = policy_head(hidden, weight, bias, TARGETS, 1.0, lambda lp, _: lp.sum() * 0.0)
    assert not out.loss.requires_grad
    assert torch.allclose(out.logprobs, reference(hidden, weight, bias, 1.0)[1], atol=1e-6)
