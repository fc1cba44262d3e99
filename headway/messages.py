"""What travels between the services, as frozen values.

Token ids travel; text is for graders and readers only, and nothing is ever
tokenised twice. On the wire these are msgpack (ledger payloads) or protobuf
(gRPC); `headway.codec` is the only place that knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "aborted"]
JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start:end` of one completion were sampled by weight `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """One unit of work: one prompt, to be completed n times.

    `ticket_id` counts up from 0 within a job and is the position in the job's
    (seeded, repeatable) stream of prompts.
    """

    ticket_id: int
    prompt_ids: tuple[int, ...]
    prompt: Any  # chat messages or a string, for graders and readers
    item: JsonObject  # the data set's row: reference answer, metadata
    n: int
    seed: int
    data_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the
    distribution it was really sampled from, after temperature and truncation.
    `spans` cover `0:len(token_ids)` without gap or overlap.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    text: str
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    error_kind: str = ""
    error_message: str = ""

    @property
    def oldest_version(self) -> int:
        """The smallest version that sampled a token; an error when none did."""
        return min(span.version for span in self.spans)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the greedy completion of a prompt earned; it is compared with, not trained on."""

    reward: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Group:
    """One ticket with its n completions: the unit that is delivered and trained."""

    ticket: Ticket
    completions: tuple[Completion, ...]
    node_id: str
    attempt: int
    start_version: int
    generate_s: float  # seconds from claim to the last token
    score_s: float  # seconds in the reward service
    baseline: Baseline | None = None  # of jobs that ask for one (`remax`)


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one completion, or why there is none. An error is never a zero."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error_kind: str = ""
    error_message: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One completion to score: its prompt, its text, the data set's row.

    Items of one request with the same `group` are completions of one prompt: a grader of
    whole groups scores them together. An empty one is a group of its own.
    `num_tokens`: of the completion as it was sampled; None where nobody knows.
    """

    prompt: Any
    completion: str
    item: JsonObject
    group: str = ""
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a publish: HF name, torch dtype name, shape, xxh3-128 hex digest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """What LoRA adapters are added to: each weight W they name becomes W + scale · B A."""

    digest: str  # of the base model's tensors, `headway.weights.base.base_digest`
    scale: float


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What one publish sends, in order; `bucket_bytes` is the packed bucket size.

    With a `base` the tensors are adapters, and a node has the base from its own model folder.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    base: AdapterBase | None = None


@dataclass(frozen=True, slots=True)
class EpochInvite:
    """One member's seat in a weight group epoch. The sender's rank is 0."""

    job_id: str
    epoch: int
    store_host: str
    store_port: int
    rank: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class InstallReport:
    """What a node says after a verified install."""

    version: int
    digest: str  # xxh3-128 over the per-tensor digests, in order
    pause_s: float  # sampling stood still for so long
