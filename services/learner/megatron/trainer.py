"""The trainer of `actor.strategy: megatron`."""

from __future__ import annotations

from pathlib import Path

import torch

from headway.jobspec import JobSpec
from services.learner.megatron.place import place_megatron
from services.learner.trainer import ModelTrainer


class MegatronTrainer(ModelTrainer):
    """Models of the Llama and Qwen family, their layers cut over neighbouring ranks."""

    def __init__(
        self,
        model_path: str | Path,
        spec: JobSpec,
        rank: int,
        world: int,
        device: torch.device,
        critic_path: Path | None = None,
    ) -> None:
        """Loads the model. InvalidSpec when its architecture, or megatron-core, is missing.

        No job of this strategy has a critic.
        """
        super().__init__(place_megatron, model_path, spec, rank, world, device)
