"""Graders that find the answer in a text and compare it: `numeric`."""

from __future__ import annotations

from math import isfinite
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from headway.graders.spec import OUTPUT_TEMPLATE, GraderSpec, checked_template


class Numeric(GraderSpec):
    """1 where the answer's number equals the reference's, else 0."""

    DETERMINISTIC: ClassVar[bool] = True

    type: Literal["numeric"] = "numeric"
    input: str = OUTPUT_TEMPLATE
    reference: Any = Field(
        default="{{item.answer}}", description="a number, a text with one, or a list of either"
    )
    extract: Literal["answer", "last", "first", "only"] = Field(
        default="answer",
        description="answer: the marked or stated answer, else the last number; only: the one"
        " number there is",
    )
    abs_tol: float = Field(default=0.0, ge=0, description="absolute tolerance")
    rel_tol: float = Field(default=0.0, ge=0, description="tolerance relative to the reference")
    percent: Literal["either", "value", "unit"] = Field(
        default="either",
        description="value: 35% is 0.35; unit: 35% is 35; either: 0.35, or 35 where beyond 1",
    )

    _check = field_validator("input")(checked_template)

    @field_validator("reference")
    @classmethod
    def _check_reference(cls, value: Any) -> Any:
        choices = value if isinstance(value, list) else [value]
        if not choices:
            raise ValueError("an empty list: name at least one right answer")
        for choice in choices:
            if not _is_reference(choice) or (isinstance(choice, float) and not isfinite(choice)):
                raise ValueError(f"{choice!r} is neither a number nor a text")
            if isinstance(choice, str):
                checked_template(choice)
        return value


def _is_reference(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
