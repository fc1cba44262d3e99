"""FlexAttention's kernels on a GPU against the block plan on a CPU; then whole models.

Float32 throughout: attention and its gradients agree to 1e-4, log-probs to 1e-3 (a GPU adds up
in another order, and its exponentials are approximations).
"""

import pytest
import torch

from headway.rl.packing import lengthened, pack
from services.learner.attention_blocks import BlockPlan
from services.learner.attention_flex import FlexPlan
from services.learner.model import DeviceRow
from tests.support.packed import CPU, SMALL, policy_of, samples_of

CUDA = torch.device("cuda")


def row_of(seeds: range):
    (row,) = pack([s for seed in seeds for s in samples_of(seed)], 10_000)
    return lengthened(row, 128)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 2)])
def test_kernels_attend_and_differentiate_as_sdpa_does(gpus, window, cap, heads, kv_heads):
    settings = {"scaling": 0.4, "window": window, "cap": cap}
    for seeds in (range(1), range(6), range(12)):  # three lengths: the kernels take any
        row = row_of(seeds)
        rng = torch.Generator().manual_seed(0)
        shapes = [(1, n, len(row.tokens), 32) for n in (heads, kv_heads, kv_heads)]
        inputs = [torch.randn(shape, generator=rng) for shape in shapes]
        slope = torch.randn(1, len(row.tokens), heads, 32, generator=rng)
        found = []
        for made, device in ((BlockPlan(row, CPU), CPU), (FlexPlan.of(row, CUDA), CUDA)):
            leaves = [x.to(device).detach().requires_grad_(True) for x in inputs]
            out = made.attend(*leaves, **settings)
            (out * slope.to(device)).sum().backward()
            found.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
        for mine, other in zip(*found, strict=True):
            assert torch.allclose(mine, other, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_s_log_probs_and_gradients_are_the_cpu_s(gpus, family, checkpointing):
    from transformers import Gemma2Config, LlamaConfig, MistralConfig

    small = {**SMALL, "head_dim": 16}
    config = {
        "llama": LlamaConfig(**small),
        "gemma2": Gemma2Config(**small, sliding_window=5, attn_logit_softcapping=2.0),
        "mistral": MistralConfig(**small, sliding_window=5),
    }[family]
    policy = policy_of(config)
    if checkpointing:
        policy.lm.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    (row,) = pack(samples_of(), 1000)
    found = []
    for device in (CPU, CUDA):
        policy.to(device)
        policy.zero_grad()
        out = policy(DeviceRow.of(row, device), 1.0, lambda lp, part: (lp * lp).sum())
        out.loss.backward()
        gradient = torch.cat([p.grad.cpu().flatten() for p in policy.lm.parameters()])
        found.append((out.logprobs.cpu()[row.flat.argsort()], gradient))
    (exact, exact_gradient), (found_logprobs, found_gradient) = found
    assert torch.allclose(found_logprobs, exact, atol=1e-3)
    assert (found_gradient - exact_gradient).abs().max() < 1e-3 * exact_gradient.abs().max()
