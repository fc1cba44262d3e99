"""Graders of how long a completion is: `length` and `overlong`."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from headway.graders.spec import OUTPUT_TEMPLATE, GraderSpec, checked_template

Unit = Literal["tokens", "characters", "words"]


class _Measured(GraderSpec):
    """What both have: a text and the unit that it is measured in."""

    DETERMINISTIC: ClassVar[bool] = True

    unit: Unit = Field(
        default="tokens",
        description="tokens: as they were sampled; characters: Unicode code points; words:"
        " what blanks separate",
    )
    input: str = OUTPUT_TEMPLATE

    _template = field_validator("input")(checked_template)

    @model_validator(mode="after")
    def _counted(self) -> Self:
        if self.unit == "tokens" and self.input.replace(" ", "") != OUTPUT_TEMPLATE:
            raise ValueError(
                "unit: only the completion itself has tokens; with an input of your own count"
                " characters or words"
            )
        return self


class Length(_Measured):
    """1 from `min` to `max`, falling to 0 over `margin` on either side."""

    type: Literal["length"] = "length"
    target: int | None = Field(default=None, ge=1, description="instead of min and max: both")
    min: int = Field(default=0, ge=0, description="shortest length that scores 1")
    max: int | None = Field(default=None, ge=0, description="longest length that scores 1")
    margin: int | None = Field(
        default=None,
        ge=0,
        description="the score is 0 so far outside, and linear between; default: the target, or 0",
    )

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        bounded = self.min > 0 or self.max is not None
        if (self.target is not None) == bounded:
            raise ValueError("either target, or min or max (or both) is given")
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class Overlong(_Measured):
    """DAPO's soft overlong punishment: 0, then linear, -penalty_factor from `max_length` on."""

    type: Literal["overlong"] = "overlong"
    max_length: int = Field(ge=1, description="L_max: from here on the whole punishment")
    len: int = Field(ge=1, description="L_cache: it grows over so many before max_length")
    penalty_factor: float = Field(default=1.0, gt=0, description="taken off at max_length")

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.len > self.max_length:
            raise ValueError(f"len {self.len} is more than max_length {self.max_length}")
        return self
