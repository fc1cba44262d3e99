"""How the training processes of a job share its policy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headway.jobspec_section import Section

_OTHER_CUTS = (
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


class MegatronSpec(Section):
    """How `strategy: megatron` cuts the policy."""

    tensor_model_parallel_size: int = Field(
        default=1, ge=1, description="ranks that share each layer; divides num_ranks"
    )
    pipeline_model_parallel_size: int = Field(default=1, ge=1, description="must be 1")
    context_parallel_size: int = Field(default=1, ge=1, description="must be 1")
    expert_model_parallel_size: int = Field(default=1, ge=1, description="must be 1")

    @model_validator(mode="after")
    def _only_tensors(self) -> Self:
        for name in _OTHER_CUTS:
            if (size := getattr(self, name)) != 1:
                raise ValueError(
                    f"{name} {size} is not possible: ranks share layers by"
                    " tensor_model_parallel_size, and nothing else; leave it at 1"
                )
        return self


class RanksSpec(Section):
    """The training processes, and what each has of the policy."""

    num_ranks: int = Field(default=1, ge=1, description="training processes")
    strategy: Literal["fsdp", "megatron"] = Field(
        default="fsdp", description="how ranks share the policy; see docs/algorithms.md"
    )
    megatron: MegatronSpec = MegatronSpec()

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        cut = self.megatron.tensor_model_parallel_size
        if self.strategy != "megatron" and cut != 1:
            raise ValueError(
                f"megatron.tensor_model_parallel_size {cut} is for strategy megatron, and the"
                f" strategy is {self.strategy}"
            )
        if self.num_ranks % cut:
            raise ValueError(
                f"megatron.tensor_model_parallel_size {cut} does not divide num_ranks"
                f" {self.num_ranks}"
            )
        return self

    def check_batch(self, groups: int, who: str = "actor") -> None:
        """ValueError when a mini-batch of `groups` cannot be shared out evenly."""
        if groups % self.data_ranks == 0:
            return
        ranks = f"actor.num_ranks {self.num_ranks}"
        if self.data_ranks != self.num_ranks:
            ranks += (
                f" / actor.megatron.tensor_model_parallel_size"
                f" {self.megatron.tensor_model_parallel_size} = {self.data_ranks}"
            )
        raise ValueError(
            f"{ranks} does not divide the mini-batch of {groups} groups"
            f" ({who}.ppo_mini_batch_size or data.train_batch_size)"
        )

    @property
    def data_ranks(self) -> int:
        """Ranks, or sets of ranks that share layers, that train on groups of their own."""
        return self.num_ranks // self.megatron.tensor_model_parallel_size

    @property
    def model_ranks(self) -> int:
        """Ranks over which one copy of the weights is cut."""
        return self.num_ranks if self.strategy == "fsdp" else self.num_ranks // self.data_ranks
