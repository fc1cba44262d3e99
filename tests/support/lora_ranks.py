"""One rank of the test of adapters on several ranks: trains, saves, exports, writes down.

python -m tests.support.lora_ranks RANK WORLD STORE_FILE MODEL FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.jobspec import JobSpec
from services.learner import trainer as trainer_module
from services.learner.trainer import FsdpTrainer
from tests.support.fsdp_ranks import CPU, LATE, mine
from tests.support.learning import job

BATCHES = (0, 1, 0)  # of the steps; 1 leaves one rank without work, and a mini-batch without any


def lora_job(model: Path, **changes: Any) -> JobSpec:
    """Large Adam eps: entries whose gradient is rounding noise must not move by it.

    Rank 3 divides neither by two ranks nor by the layers' widths.
    """
    return job(
        model,
        model__lora_rank=3,
        model__lora_alpha=6,
        actor__ppo_mini_batch_size=2,
        actor__optim__lr=1e-2,
        actor__optim__eps=1e-4,
        actor__use_kl_loss=True,
        **changes,
    )


def stats_of(trainer: FsdpTrainer, rank: int, world: int) -> list[dict[str, float]]:
    """What the steps say."""
    return [trainer.train_step(s, mine(b, rank, world), LATE) for s, b in enumerate(BATCHES)]


def run(rank: int, world: int, model: Path, folder: Path) -> dict[str, Any]:
    """What this rank saw."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    trainer = FsdpTrainer(model, lora_job(model), rank, world, CPU)
    seen: dict[str, Any] = {"before": dict(trainer.weights())}
    seen["stats"] = stats_of(trainer, rank, world)
    seen["weights"] = dict(trainer.weights())
    save(trainer.state(), checkpoint_id=folder / "two")
    trainer.export(folder / "export")
    resumed = FsdpTrainer(model, lora_job(model), rank, world, CPU)
    state = resumed.state()
    load(state, checkpoint_id=folder / "one")  # one rank wrote it after all steps
    resumed.load_state(state)
    seen["resumed"] = dict(resumed.weights())
    seen["base_is_sharded"] = all(
        p.to_local().numel() < p.numel() for p in trainer.policy.lm.parameters() if p.ndim > 1
    )

    trainer_module.compute_dtype = lambda wanted, device: torch.bfloat16  # type: ignore[assignment]
    half = FsdpTrainer(model, lora_job(model, actor__gradient_checkpointing=True), rank, world, CPU)
    seen["bf16_stats"] = stats_of(half, rank, world)
    seen["bf16_dtypes"] = {
        name: str(p.dtype) for name, p in half.policy.lm.named_parameters() if "lora_" in name
    }
    seen["bf16_base"] = sorted(
        {str(p.dtype) for name, p in half.policy.lm.named_parameters() if "lora_" not in name}
    )
    return seen


def main() -> None:
    """Joins the group, runs, writes `rank-<n>.pt`."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, model, folder = sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.save(run(rank, world, model, folder), folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
