"""One rank of the FSDP2 test on GPUs: bfloat16 products, NCCL, one device a rank.

    python -m tests.support.cuda_ranks RANK WORLD STORE_FILE MODEL FOLDER

Sharded by FSDP2 also when it is alone, so that one GPU runs the same code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.jobspec import AlgorithmSpec
from services.learner.model import load_policy
from services.learner.objective import Objective
from services.learner.sharding import shard, whole
from services.learner.step import backward, make_share
from tests.support.learning import batch_of, random_groups

GROUPS, N = 4, 4


def gradients(
    model: Path, dtype: torch.dtype, rank: int, world: int, device: torch.device, *, sharded: bool
) -> dict[str, Any]:
    """Loss, log-probs and whole gradients of a rank's groups; the loss is divided by all tokens."""
    policy = load_policy(model)
    if sharded:
        shard(policy, dtype, world, device)
    groups = random_groups(GROUPS, N, seed=11)
    count = sum(batch_of([g]).num_tokens for g in groups)
    share = make_share(batch_of(groups[rank::world]), device)
    objective = Objective(AlgorithmSpec())
    found = backward(policy, share, len(share.rows), count, 1.0, objective, device)
    named = policy.lm.named_parameters()
    return {
        "loss": found.loss,
        "logprobs": found.logprobs.cpu(),
        "gradients": {n: whole(p.grad).cpu() for n, p in named if p.grad is not None},
        "dtypes": sorted({str(p.dtype) for p in policy.parameters()}),
        "sharded": sorted({type(p).__name__ for p in policy.parameters()}),
    }


def main() -> None:
    """Joins the group, runs one pass, writes `rank-<n>.pt`."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, model, folder = sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device
    )
    found = gradients(model, torch.bfloat16, rank, world, device, sharded=True)
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
