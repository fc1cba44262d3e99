"""Which trainer a job gets on this learner, and what it starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.jobspec import JobSpec
from headway.messages import AdapterBase
from headway.models import model_digest, resolve_model
from headway.weights.base import base_digest
from services.learner.batch import share
from services.learner.crew import Share
from services.learner.megatron.trainer import MegatronTrainer
from services.learner.sim_trainer import SimTokenizer, SimTrainer
from services.learner.train import RankSettings
from services.learner.trainer import FsdpTrainer, Trainer

# (model, job, rank, ranks, device, what a critic starts from when it is another) -> the trainer
Made = Callable[[Path, JobSpec, int, int, torch.device, Path | None], Trainer]
_STRATEGIES: Mapping[str, Made] = {
    "fsdp": FsdpTrainer,
    "megatron": MegatronTrainer,
}


@dataclass(frozen=True, slots=True)
class Base:
    """The model a job starts from. The sim trainer's is in no folder."""

    folder: Path
    sha256: str
    tokenizer: Any
    critic: dict[str, str] | None = None  # path, folder and sha256 of one with its own start


def base_folder(spec: JobSpec, settings: RankSettings) -> Path:
    """The model's folder, fetched when it is not here yet."""
    return Path() if settings.trainer.kind == "sim" else resolve_model(spec.model.path)


def critic_folder(spec: JobSpec, settings: RankSettings) -> Path | None:
    """The folder that a critic starts from when it is not the policy's, fetched if need be."""
    path = spec.critic.model.path
    if not spec.has_critic or path is None or settings.trainer.kind == "sim":
        return None
    return resolve_model(path, key="critic.model.path")


def critic_facts(spec: JobSpec, settings: RankSettings) -> dict[str, str] | None:
    """What environment.json says of that folder."""
    folder, path = critic_folder(spec, settings), spec.critic.model.path
    if folder is None or path is None:
        return None
    return {"path": path, "folder": str(folder), "sha256": model_digest(folder)}


def load_base(spec: JobSpec, settings: RankSettings) -> Base:
    """Finds the model and its tokenizer. InvalidSpec or Unavailable: it is not to be had."""
    if settings.trainer.kind == "sim":
        return Base(Path(), "", SimTokenizer())
    folder = base_folder(spec, settings)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Base(folder, model_digest(folder), tokenizer, critic_facts(spec, settings))


def adapter_base(spec: JobSpec, settings: RankSettings, folder: Path) -> AdapterBase | None:
    """What the published adapters are added to; None where whole weights are published."""
    if settings.trainer.kind == "sim" or not spec.model.lora_rank:
        return None
    return AdapterBase(base_digest(folder), spec.model.lora_scale)


def build_trainer(spec: JobSpec, settings: RankSettings, folder: Path) -> tuple[Trainer, Share]:
    """This rank's trainer, and the rule by which a batch is shared out."""
    trainer: Trainer
    if settings.trainer.kind == "sim":
        trainer = SimTrainer(spec, settings.rank, settings.world, settings.trainer)
    else:
        device = torch.device(device_of(settings.rank))
        critic = critic_folder(spec, settings)
        made = _STRATEGIES[spec.actor.strategy]
        trainer = made(folder, spec, settings.rank, settings.world, device, critic)
    data_ranks = spec.actor.data_ranks

    def shared(ids: Sequence[int], rank: int) -> list[int]:
        # ranks that share layers are neighbours, and train on the same groups
        return share(ids, rank * data_ranks // settings.world, data_ranks, spec.mini_batch_size)

    return trainer, shared


def device_of(rank: int) -> str:
    """The device a rank trains on."""
    return f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
