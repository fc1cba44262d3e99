"""What a local fleet is made of, and how it shares the cores out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HOST = "127.0.0.1"
DEFAULT_API_PORT = 8700


@dataclass(frozen=True, slots=True)
class LocalFleetSpec:
    """What to start. Core lists are CPU indices; a pool's nodes share its list."""

    state_dir: Path
    runs_dir: Path
    engine: Literal["vllm", "sim"]
    num_rollouts: int
    learner_cores: tuple[int, ...]
    rollout_cores: tuple[int, ...]
    api_port: int = DEFAULT_API_PORT
    redis_url: str | None = None  # None: an embedded server
    ephemeral: bool = False  # an embedded server starts empty: no jobs of earlier fleets


def split_cores(cores: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Halves the machine: (learner's, rollout's). An odd core goes to the learner.

    With one core both pools share it.
    """
    if len(cores) < 2:
        return cores, cores
    middle = (len(cores) + 1) // 2
    return cores[:middle], cores[middle:]


def deal_cores(cores: tuple[int, ...], num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """A pool's cores for each of its nodes: disjoint where there are enough, else shared."""
    if len(cores) < num_nodes:
        return (cores,) * num_nodes
    return tuple(cores[i::num_nodes] for i in range(num_nodes))
