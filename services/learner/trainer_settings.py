"""Which trainer an agent's ranks have, as flags that are passed on to them. No torch here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from headway.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What the learner, not the job, decides about its trainer."""

    kind: Literal["fsdp", "sim"] = "fsdp"
    sim_step_s: float = 0.0  # what an optimiser step takes
    sim_weight_mib: float = 0.0  # sent with each version, beyond the few numbers there are

    def __post_init__(self) -> None:
        if self.sim_step_s < 0 or self.sim_weight_mib < 0:
            raise InvalidSpec("--sim-step-s and --sim-weight-mib are not negative")

    def flags(self) -> tuple[str, ...]:
        """The flags that say the same to another process."""
        return (
            *("--trainer", self.kind, "--sim-step-s", str(self.sim_step_s)),
            *("--sim-weight-mib", str(self.sim_weight_mib)),
        )


def add_trainer_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of an agent and of its ranks."""
    parser.add_argument("--trainer", choices=("fsdp", "sim"), default="fsdp")
    sim = parser.add_argument_group("the sim trainer, for tests and benchmarks").add_argument
    sim("--sim-step-s", type=float, default=0.0, help="what an optimiser step takes")
    sim("--sim-weight-mib", type=float, default=0.0, help="ballast of each version")


def trainer_settings(namespace: argparse.Namespace) -> TrainerSettings:
    """Settings from parsed flags. InvalidSpec for a negative number."""
    return TrainerSettings(namespace.trainer, namespace.sim_step_s, namespace.sim_weight_mib)
