"""The grader `reasoning_gym`: the data sets' own scores."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from headway.graders.spec import OUTPUT_TEMPLATE, GraderSpec, checked_template


class ReasoningGym(GraderSpec):
    """The score of a reasoning_gym data set's own `score_answer`, from 0 to 1."""

    DETERMINISTIC: ClassVar[bool] = True

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str | None = Field(
        default=None, description="default: the item's metadata.source_dataset"
    )
    input: str = OUTPUT_TEMPLATE
    extract: Literal["whole", "last_line", "marker", "tag"] = Field(
        default="whole", description="what of the input is the answer; tag: <answer>…</answer>"
    )
    marker: str = Field(default="", description="with extract: marker, what the answer follows")
    strict: bool = Field(default=False, description="no partial credit: below 1 is 0")

    _check = field_validator("input")(checked_template)

    @model_validator(mode="after")
    def _marker_fits(self) -> Self:
        if (self.extract == "marker") != bool(self.marker):
            raise ValueError("marker is given with, and only with, extract: marker")
        return self

    def needs(self) -> dict[str, str]:
        """The item's answer and, unless the grader names it, its data set."""
        wanted = {" (reasoning_gym)": "item.answer"}
        if self.dataset is None:
            wanted[".dataset"] = "item.metadata.source_dataset"
        return wanted
