"""How a job samples: its prompts, the rollout fleet, and how completions are scored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from headway.jobspec_section import Gib, Section
from headway.precision import DtypeOrAuto


class DataSpec(Section):
    """Where prompts come from and how many make a step."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "huggingface"]
    name: str = Field(description="reasoning_gym dataset name, or the path of a file or folder")
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="reasoning_gym settings; of a Hugging Face folder `name` and `split`",
    )
    prompt_key: str = Field(default="prompt", description="column of a file that holds the prompt")
    size: int = Field(default=10_000, ge=1, description="reasoning_gym problems in one epoch")
    seed: int = Field(default=0, ge=0, description="seed of the generated problems")
    system_prompt: str | None = Field(default=None, description="prepended to each conversation")
    suffix: str = Field(default="", description="appended to the question")
    shuffle: bool = True
    train_batch_size: int = Field(default=8, ge=1, description="B: groups (prompts) a step")
    max_prompt_length: int = Field(
        default=512, ge=1, description="tokens; longer prompts are skipped"
    )


class OverlongSpec(Section):
    """A soft penalty for completions near max_tokens (DAPO)."""

    enable: bool = False
    len: int = Field(default=64, ge=1, description="tokens before max_tokens in which it grows")
    penalty_factor: float = Field(default=1.0, gt=0, description="taken off at max_tokens")


class RewardSpec(Section):
    """How completions are scored."""

    grader: dict[str, Any]
    on_error: Literal["rescore", "drop_group", "fail"] = "drop_group"
    max_rescores: int = Field(default=2, ge=0)
    timeout_s: float = Field(default=10.0, gt=0, le=3600, description="limit for one item")
    overlong_buffer: OverlongSpec = OverlongSpec()


class RolloutSpec(Section):
    """How the rollout fleet samples."""

    n: int = Field(default=8, ge=1, description="completions a prompt")
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: off")
    max_tokens: int = Field(default=256, ge=1, description="tokens a completion")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    dtype: DtypeOrAuto = Field(
        default="auto", description="of the weights sent and sampled with; auto as compute_dtype"
    )
    min_nodes: int = Field(default=1, ge=1, description="nodes needed to start")
    max_nodes: int | None = Field(default=None, ge=1, description="nodes used at most")
    enforce_eager: bool = True
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    kv_cache_gib: Gib = Field(default=1.0, gt=0, description="KV cache on CPU engines")
    max_num_seqs: int = Field(default=64, ge=1, description="completions sampled at once a node")
    update_timeout_s: float = Field(default=20.0, gt=0, le=3600, description="broadcast deadline")
    snapshot_dir: str | None = Field(
        default=None,
        description="folder that the learner and all nodes share: newcomers read weights there",
    )
    lease_s: float = Field(
        default=30.0, ge=1, le=3600, description="a silent node's tickets go to another after it"
    )
