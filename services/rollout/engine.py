"""What a rollout node asks of an inference engine.

Two engines keep this promise: `vllm_engine` samples a language model, `sim_engine`
imitates one for tests and benchmarks of the framework. One contract suite,
tests/contract/test_engine.py, runs over both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from headway.data.chat import Messages
from headway.messages import (
    Completion,
    EpochInvite,
    FinishReason,
    InstallReport,
    VersionSpan,
    WeightManifest,
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. `top_k` 0 and `top_p` 1 leave the distribution whole."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy, the likeliest token each time, whatever the seed
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """What a visitor wants to see of a completion. Alternatives: None: no log-probs at all."""

    alternatives: int | None = None  # likeliest tokens at each place of the completion
    prompt_alternatives: int | None = None  # and of the prompt
    in_pieces: bool = False  # as it is sampled


@dataclass(frozen=True, slots=True)
class SeenToken:
    """A token with its log-prob and the likeliest others of its place, likeliest first.

    A completion's are of the distribution it was sampled from, as in a `Completion`; a prompt's
    of the model's own, at temperature 1. The first token of a prompt has no log-prob.
    """

    token_id: int
    text: str
    logprob: float | None
    others: tuple[tuple[str, float], ...] = ()  # the token itself included, where it is one


@dataclass(frozen=True, slots=True)
class Piece:
    """What a visitor's completion has grown by. The last one has reason and spans."""

    text: str
    num_tokens: int
    tokens: tuple[SeenToken, ...] = ()  # when log-probs were asked for
    prompt: tuple[SeenToken, ...] = ()  # in the first piece, when asked for
    finish_reason: FinishReason | None = None
    spans: tuple[VersionSpan, ...] = ()


class Words(Protocol):
    """Between text and an engine's token ids."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a plain prompt, special tokens included as the tokenizer has them."""

    def encode_chat(self, messages: Messages) -> tuple[int, ...]:
        """Ids of a conversation by the model's template. InvalidSpec: there is none, or it fails.

        What a message says is never read as a special token.
        """

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """The text of ids, special tokens in their own words. InvalidSpec: an id that is none."""


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

    def visit(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        seed: int,
        look: Look,
    ) -> AsyncGenerator[Piece]:
        """One completion for someone outside the job, after the job's own work.

        It takes none of the places that `generate` has, and gives way to them. In one piece
        unless `look` says otherwise. Closing the generator, or cancelling, aborts it.
        InvalidSpec: the engine cannot sample from this prompt. Unavailable: the engine ended.
        """

    async def words(self) -> Words:
        """The model's tokenizer."""

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt plus completion; None: no limit."""

    async def adopt(self, version: int) -> None:
        """Calls the weights it started with `version` and samples: no learner sends any."""

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
