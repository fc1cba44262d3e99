"""One rank of the Megatron test: trains, saves, exports and writes down what it saw.

python -m tests.support.megatron_ranks RANK WORLD STORE_FILE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.jobspec import JobSpec
from headway.messages import Group
from services.learner import head as head_module
from services.learner import trainer as trainer_module
from services.learner.batch import share
from services.learner.megatron.trainer import MegatronTrainer
from services.learner.step import make_share, recompute
from services.learner.trainer import ModelTrainer
from tests.support.fsdp_ranks import ALGORITHMS, LATE, batch
from tests.support.learning import batch_of, job

CPU = torch.device("cpu")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    # two groups of heads a rank, a vocabulary that does not divide, stretched positions
    "llama-odd": (
        "llama",
        {
            "tie_word_embeddings": False,
            "vocab_size": 321,
            "num_key_value_heads": 4,
            "num_attention_heads": 8,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
}


def cut_job(model: Path, tensor_parallel: int = 2, **changes: Any) -> JobSpec:
    """As `fsdp_job`: an Adam eps that keeps rounding noise from moving a weight."""
    settings: dict[str, Any] = {
        "actor__strategy": "megatron",
        "actor__num_ranks": 2,
        "actor__megatron__tensor_model_parallel_size": tensor_parallel,
        **plain_settings(),
    }
    return job(model, **(settings | changes))


def plain_settings() -> dict[str, Any]:
    """What the one-rank trainer has as well."""
    return {
        "actor__ppo_mini_batch_size": 2,
        "actor__optim__lr": 1e-3,
        "actor__optim__eps": 1e-4,
        "actor__optim__weight_decay": 0.01,
    }


def moments(trainer: ModelTrainer) -> dict[str, Tensor]:
    """Adam's first moments, whole; after one update a tenth of the clipped gradient."""
    found: dict[str, Tensor] = trainer.state()["exp_avg"]
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in found.items()
    }


def logprobs(trainer: ModelTrainer, groups: list[Group]) -> Tensor:
    """log π of all completion tokens of a batch, through packed rows."""
    made = make_share(batch_of(groups, late=LATE), CPU, row_tokens=40)
    return recompute(trainer.policy, made, len(made.rows), 1.0, CPU)


def copied(trainer: ModelTrainer) -> dict[str, Tensor]:
    """What would be published, as it is now."""
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def one_update(trainer: ModelTrainer) -> dict[str, Any]:
    """A step of a single update: what it said, the gradient and the weights."""
    stats = trainer.train_step(0, batch(0), LATE)
    return {"stats": stats, "moments": moments(trainer), "weights": copied(trainer)}


def family(name: str, rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What every family is asked."""
    spec = cut_job(folder / name, actor__ppo_mini_batch_size=4)
    trainer = MegatronTrainer(folder / name, spec, rank, world, CPU)
    return {
        "before": copied(trainer),
        "logprobs": logprobs(trainer, batch(0)),
        "update": one_update(trainer),
    }


def steps(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Steps, checkpoints and exports of one family."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    model = folder / "llama-odd"
    spec = cut_job(model)
    trainer = MegatronTrainer(model, spec, rank, world, CPU)
    seen: dict[str, Any] = {
        "stats": [trainer.train_step(s, batch(s), LATE) for s in (0, 1, 2)],
        "digest": trainer.digest(),
        "weights": copied(trainer),
    }
    save(trainer.state(), checkpoint_id=folder / "two")
    trainer.export(folder / "export")

    resumed = MegatronTrainer(model, spec, rank, world, CPU)
    state = resumed.state()
    load(state, checkpoint_id=folder / "one")  # one rank of the other strategy wrote it
    resumed.load_state(state)
    seen["resumed"] = resumed.train_step(1, batch(1), LATE)
    seen["resumed_weights"] = copied(resumed)

    # the same ranks, each with a whole model and every second group
    spread = MegatronTrainer(model, cut_job(model, 1), rank, world, CPU)
    state = spread.state()
    load(state, checkpoint_id=folder / "two")
    spread.load_state(state)
    seen["spread_loaded"] = copied(spread)
    own = [batch(1)[i] for i in share(range(4), rank, world, 2)]
    seen["spread"] = spread.train_step(3, own, LATE)
    seen["spread_weights"] = copied(spread)
    return seen


def variants(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Other ways to make a step."""
    model = folder / "qwen2"
    changes = {
        "algorithm": ALGORITHMS["whole completions"],
        "checkpointing": {"actor__gradient_checkpointing": True},
        "plain": {},
    }
    seen: dict[str, Any] = {}
    for name, change in changes.items():
        trainer = MegatronTrainer(model, cut_job(model, **change), rank, world, CPU)
        seen[name] = [trainer.train_step(s, batch(s), LATE) for s in (0, 1)]
        seen[f"{name} weights"] = copied(trainer)
    trainer_module.compute_dtype = lambda wanted, device: torch.bfloat16  # type: ignore[assignment]
    half = MegatronTrainer(model, cut_job(model), rank, world, CPU)
    seen["half"] = half.train_step(0, batch(0), LATE)
    seen["half masters"] = {str(p.dtype) for p in half.state()["model"].values()}
    seen["half weights"] = copied(half)
    return seen


def run(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What this rank saw."""
    head_module.CHUNK_BYTES = 4 * 161 * 3  # three positions at once, on every rank
    return {
        "families": {name: family(name, rank, world, folder) for name in FAMILIES},
        "steps": steps(rank, world, folder),
        "variants": variants(rank, world, folder),
    }


def main() -> None:
    """Joins the group, runs, writes `rank-<n>.pt`."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, folder = sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.save(run(rank, world, folder), folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
