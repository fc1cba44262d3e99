"""The grader `judge`: a model, asked for a verdict."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from headway.graders.outside import Outside, checked_extra
from headway.graders.spec import OUTPUT_TEMPLATE
from headway.labels import label_key

_OURS = {"model", "messages", "temperature", "max_tokens", "seed"}


class Message(BaseModel):
    """One message to the judge; its content is a template."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class Judge(Outside):
    """The verdict of a model behind an OpenAI-compatible endpoint."""

    type: Literal["judge"] = "judge"
    model: str | None = Field(default=None, description="default: the endpoint's")
    criteria: str = Field(
        default="", description="what is judged, for the built-in messages; a template"
    )
    question: str = Field(
        default="{{prompt}}", description="what was asked, for the built-in messages"
    )
    reference: str | None = Field(
        default=None, description="a right answer to compare with, for the built-in messages"
    )
    input: str = Field(default=OUTPUT_TEMPLATE, description="the text that is judged")
    messages: list[Message] = Field(
        default=[], max_length=32, description="instead of criteria: messages of one's own"
    )
    range: tuple[float, float] = Field(
        default=(0.0, 1.0), description="lowest and highest verdict; any other is none"
    )
    labels: dict[str, float] = Field(
        default_factory=dict, max_length=64, description="instead of range: verdict -> reward"
    )
    normalize: bool = Field(default=False, description="bring the range to 0..1")
    pattern: str | None = Field(
        default=None, max_length=4096, description="its last match (group 1) is the verdict"
    )
    json_field: str | None = Field(
        default=None, description="of the answer's last JSON object, this is the verdict"
    )
    samples: int = Field(default=1, ge=1, le=64, description="how often the judge is asked")
    combine: Literal["median", "mean", "vote"] = "median"
    temperature: float | None = Field(default=0.0, ge=0, description="null: the endpoint's own")
    max_tokens: int | None = Field(default=1024, ge=1, description="null: the endpoint's own")
    seed: int | None = Field(default=None, description="of the first sample; then one more each")
    extra: dict[str, JsonValue] = Field(
        default_factory=dict, description="more keys of the request, such as top_p"
    )

    def own_templates(self) -> list[tuple[str, str]]:
        """Those of the messages that are sent."""
        if self.messages:
            return [(f"messages.{i}", m.content) for i, m in enumerate(self.messages)]
        built_in = [
            ("criteria", self.criteria),
            ("question", self.question),
            ("input", self.input),
        ]
        return built_in if self.reference is None else [*built_in, ("reference", self.reference)]

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if groups > 1:
            raise ValueError("at most one group: it is the verdict (others are (?:…))")
        return pattern

    @field_validator("extra")
    @classmethod
    def _extra_fits(cls, extra: dict[str, Any]) -> dict[str, Any]:
        return checked_extra(extra, _OURS)

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: dict[str, float]) -> dict[str, float]:
        if len({label_key(label) for label in labels}) < len(labels) or "" in map(
            label_key, labels
        ):
            raise ValueError("labels differ by more than case, blanks and punctuation around them")
        return labels

    @model_validator(mode="after")
    def _judge_fits(self) -> Self:
        if bool(self.criteria) == bool(self.messages):
            raise ValueError("give either criteria or messages")
        if self.url is not None and self.model is None:
            raise ValueError("model: a judge at a url is asked for a model by name")
        if self.range[0] >= self.range[1]:
            raise ValueError("range: the lowest verdict is below the highest")
        if self.labels and (self.normalize or "range" in self.model_fields_set):
            raise ValueError("labels have their rewards: range and normalize do not go with them")
        if self.pattern is not None and self.json_field is not None:
            raise ValueError("give either pattern or json_field")
        return self
