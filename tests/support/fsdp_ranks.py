"""One rank of the FSDP test: trains, saves, exports and writes down what it saw.

python -m tests.support.fsdp_ranks RANK WORLD STORE_FILE MODEL FOLDER [cut]

With `cut` it is one of the runs that differ only in how a batch is cut into passes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.jobspec import JobSpec
from headway.messages import Group
from services.learner import trainer as trainer_module
from services.learner.batch import share
from services.learner.trainer import FsdpTrainer
from tests.support.learning import job, random_groups

CPU = torch.device("cpu")


def fsdp_job(model: Path) -> JobSpec:
    """Large Adam eps: entries whose gradient is rounding noise must not move by it."""
    return job(
        model,
        actor__ppo_mini_batch_size=2,
        actor__optim__lr=1e-3,
        actor__optim__eps=1e-4,
        actor__optim__weight_decay=0.01,
    )


ALGORITHMS: dict[str, dict[str, Any]] = {
    "whole completions": {
        "algorithm__policy_loss": "gspo",
        "algorithm__rollout_correction__type": "none",
        "actor__use_kl_loss": True,
        "actor__entropy_coeff": 0.01,
    },
    "whole batch": {
        "algorithm__adv_estimator": "reinforce_plus_plus_baseline",
        "algorithm__loss_agg_mode": "seq-mean-token-mean",
        "algorithm__rollout_correction__level": "sequence",
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl": {"type": "adaptive", "horizon": 100},
    },
    "critic": {
        "algorithm__adv_estimator": "gae",
        "algorithm__lam": 0.9,
        "algorithm__use_kl_in_reward": True,
        "critic__optim__lr": 1e-2,
        "critic__optim__eps": 1e-4,
        "critic__ppo_mini_batch_size": 4,
        "critic__ppo_epochs": 2,
        "actor__optim__eps": 1e-4,
    },
}


def algorithm_stats(name: str, model: Path, rank: int, world: int) -> list[dict[str, float]]:
    """What the steps 0 and 1 say under an algorithm that looks beyond one token and one rank."""
    spec = job(model, actor__ppo_mini_batch_size=2, actor__optim__lr=1e-3, **ALGORITHMS[name])
    trainer = FsdpTrainer(model, spec, rank, world, CPU)
    return [trainer.train_step(s, mine(s, rank, world), LATE) for s in (0, 1)]


def batch(step: int) -> list[Group]:
    """Step 0: all ranks have work. Step 1: rank 1 of 2 has none in the first mini-batch,
    and nobody has any in the second. Step 2: as 0, but poisoned on one rank."""
    equal = {1: [1, 2, 3]}.get(step, [])
    groups = random_groups(4, 4, seed=20 + step, equal=equal)
    if step == 2:
        first = groups[1].completions[0]
        nan = replace(first, logprobs=(float("nan"), *first.logprobs[1:]))
        groups[1] = replace(groups[1], completions=(nan, *groups[1].completions[1:]))
    return groups


LATE = frozenset(range(4))


def mine(step: int, rank: int, world: int) -> list[Group]:
    """A rank's groups of a step, by the learner's own rule."""
    groups = batch(step)
    return [groups[i] for i in share(range(4), rank, world, 2)]


CUTS: dict[str, dict[str, Any]] = {
    "few rows": {},
    "many rows": {"actor__ppo_max_token_len_per_gpu": 64},
}


def cut_run(cut: str, model: Path, rank: int, world: int, *, order: int = 1) -> dict[str, Any]:
    """Two steps of 8 groups in mini-batches of 4: what they say, and the weights after them.

    `order` -1 has the groups of each mini-batch backwards. One rank has no work in step 1.
    """
    spec = job(
        model,
        data__train_batch_size=8,
        actor__ppo_mini_batch_size=4,
        actor__optim__lr=1e-3,
        actor__optim__eps=1e-4,
        algorithm__rollout_correction__type="none",
        **CUTS[cut],
    )
    trainer = FsdpTrainer(model, spec, rank, world, CPU)
    stats = []
    for step, equal in enumerate(([], [2])):
        groups = random_groups(8, 4, seed=40 + step, equal=equal)
        groups = groups[:4][::order] + groups[4:][::order]
        chosen = [groups[i] for i in share(range(8), rank, world, 4)]
        stats.append(trainer.train_step(step, chosen, frozenset(range(8))))
    return {"stats": stats, "weights": dict(trainer.weights())}


def run(rank: int, world: int, model: Path, folder: Path) -> dict[str, Any]:
    """What this rank saw."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    spec = fsdp_job(model)
    trainer = FsdpTrainer(model, spec, rank, world, CPU)
    seen: dict[str, Any] = {
        "stats": [trainer.train_step(s, mine(s, rank, world), LATE) for s in (0, 1, 2)]
    }
    seen["weights"] = dict(trainer.weights())
    save(trainer.state(), checkpoint_id=folder / "two")
    trainer.export(folder / "export")
    resumed = FsdpTrainer(model, spec, rank, world, CPU)
    state = resumed.state()
    load(state, checkpoint_id=folder / "one")  # one rank wrote it after step 0
    resumed.load_state(state)
    seen["resumed_stats"] = resumed.train_step(1, mine(1, rank, world), LATE)
    seen["resumed"] = dict(resumed.weights())

    seen["algorithms"] = {name: algorithm_stats(name, model, rank, world) for name in ALGORITHMS}

    trainer_module.compute_dtype = lambda wanted, device: torch.bfloat16  # type: ignore[assignment]
    half = FsdpTrainer(model, spec, rank, world, CPU)
    seen["bf16_stats"] = half.train_step(0, mine(0, rank, world), LATE)
    seen["bf16_weights"] = dict(half.weights())
    seen["bf16_masters"] = {str(p.dtype) for p in half.policy.parameters()}
    return seen


def main() -> None:
    """Joins the group, runs, writes `rank-<n>.pt`."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, model, folder = sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    cut = " ".join(sys.argv[6:])
    found = cut_run(cut, model, rank, world) if cut else run(rank, world, model, folder)
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
