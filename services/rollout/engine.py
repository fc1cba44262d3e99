"""What a rollout node asks of an inference engine.

Two engines keep this promise: `vllm_engine` samples a language model, `sim_engine`
imitates one for tests and benchmarks of the framework. One contract suite,
tests/contract/test_engine.py, runs over both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from headway.messages import Completion, EpochInvite, InstallReport, WeightManifest


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. `top_k` 0 and `top_p` 1 leave the distribution whole."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy, the likeliest token each time, whatever the seed
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()


class Engine(Protocol):
    """Samples completions and takes new weights while it does."""

    transport: Literal["broadcast", "none"]

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends of torch.distributed that it can join a weight group with."""

    async def start(self) -> None:
        """Loads the model; returns when it can sample."""

    async def generate(
        self, request_id: str, prompt_ids: tuple[int, ...], n: int, sampling: Sampling, seed: int
    ) -> tuple[Completion, ...]:
        """n completions, in order. Spans name the version of every token.

        Cancelling the call aborts the request in the engine.
        """

    async def join(self, invite: EpochInvite) -> None:
        """Takes a seat in a weight group epoch; leaves any older one first."""

    async def install(self, manifest: WeightManifest, timeout_s: float) -> InstallReport:
        """Receives, verifies and installs one version; requests in flight go on.

        Raises WeightMismatch (tensor named) or EpochBroken. After either the engine
        samples nothing until a later install succeeds.
        """

    async def install_snapshot(
        self, manifest: WeightManifest, path: Path, timeout_s: float
    ) -> InstallReport:
        """As `install`, from a file of the version's packed buckets; needs no seat.

        Errors before the version is loaded (Unavailable: no such file; WeightMismatch) leave
        the older one sampling.
        """

    async def leave(self) -> None:
        """Leaves the weight group; safe to repeat."""

    @property
    def version(self) -> int | None:
        """The installed version; None until the first install."""

    @property
    def num_completions_in_flight(self) -> int:
        """Completions being sampled now."""

    @property
    def num_tokens_sampled(self) -> int:
        """Tokens sampled since the start."""

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one completion was being sampled."""

    async def close(self) -> None:
        """Ends the engine and its processes."""
