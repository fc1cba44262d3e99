"""What is asked in an evaluation, and how: the section `evaluation` of a job.

The same in a job that does nothing else and in one that trains and looks at held-out data on
the way.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from headway.jobspec_section import Section


class EvalDataSpec(Section):
    """One data set of an evaluation; its rows are asked in their order, each once."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "huggingface"]
    name: str = Field(description="reasoning_gym dataset name, or the path of a file or folder")
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="reasoning_gym settings; of a Hugging Face folder `name` and `split`",
    )
    prompt_key: str = Field(default="prompt", description="column of a file that holds the prompt")
    size: int = Field(default=200, ge=1, description="reasoning_gym problems")
    seed: int = Field(default=0, ge=0, description="seed of the generated problems")
    limit: int | None = Field(default=None, ge=1, description="only the first rows")
    data_source: str | None = Field(
        default=None,
        max_length=200,
        description="name of its table; default: each row's data_source, or the data set's name",
    )
    system_prompt: str | None = Field(default=None, description="prepended to each conversation")
    suffix: str = Field(default="", description="appended to the question")
    grader: dict[str, Any] | None = Field(default=None, description="default: reward.grader")


class EvaluationSpec(Section):
    """Held-out data, and how it is sampled."""

    data: tuple[EvalDataSpec, ...] = Field(default=(), description="what is asked")
    n: int = Field(default=1, ge=1, le=4096, description="completions a prompt")
    temperature: float = Field(default=0.0, ge=0, description="0: greedy")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: off")
    max_tokens: int | None = Field(
        default=None, ge=1, description="tokens a completion; default: rollout.max_tokens"
    )
    seed: int = Field(default=0, ge=0, description="of the sampling")
    pass_reward: float = Field(
        default=1.0, description="a completion is right, for pass@k, from this reward on"
    )
    test_freq: int = Field(
        default=0, ge=0, description="steps between evaluations of a training job; 0: none"
    )
    val_before_train: bool = Field(
        default=True, description="with test_freq: evaluate the first weights too"
    )

    @model_validator(mode="after")
    def _completions_differ(self) -> Self:
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n {self.n} with temperature 0: greedy completions of a prompt are all the same;"
                " set a temperature, or n 1"
            )
        if self.test_freq and not self.data:
            raise ValueError("test_freq without data: name the data sets to evaluate on")
        return self
