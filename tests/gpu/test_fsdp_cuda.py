"""FSDP2 in bfloat16 over NCCL, a rank a GPU, against one float32 process on the CPU.

bfloat16 keeps 8 bits: losses agree to 3 %, log-probs to 0.1, gradients by direction.
"""

import subprocess
import sys

import pytest
import torch

from tests.support.cuda_ranks import gradients
from tests.support.tiny_model import build_tiny_model

CPU = torch.device("cpu")


def test_bfloat16_shards_have_the_float32_gradient(gpus, tmp_path):
    world = min(2, gpus)  # NCCL takes one rank a device
    model = build_tiny_model(tmp_path / "model", seed=3)
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.cuda_ranks", str(rank), str(world)),
                *(str(tmp_path / "store"), str(model), str(tmp_path)),
            ]
        )
        for rank in range(world)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * world
    found = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(world)]
    exact = gradients(model, torch.float32, 0, 1, CPU, sharded=False)
    assert found[0]["dtypes"] == ["torch.float32"] and found[0]["sharded"] == ["DTensor"]
    assert sum(one["loss"] for one in found) == pytest.approx(exact["loss"], rel=0.03, abs=1e-3)
    if world == 1:
        assert (found[0]["logprobs"] - exact["logprobs"]).abs().max() < 0.1
    for name, gradient in exact["gradients"].items():
        mine = found[0]["gradients"][name]
        assert torch.equal(mine, found[-1]["gradients"][name])
        cosine = torch.nn.functional.cosine_similarity(mine.flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.99, name
        assert float(mine.norm()) == pytest.approx(float(gradient.norm()), rel=0.05), name
