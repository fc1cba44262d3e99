"""Graders that find the answer in a text and compare it."""

from __future__ import annotations

from math import isfinite
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from headway.graders.spec import OUTPUT_TEMPLATE, GraderSpec, checked_template


def _checked_reference(value: Any) -> Any:
    choices = value if isinstance(value, list) else [value]
    if not choices:
        raise ValueError("an empty list: name at least one right answer")
    for choice in choices:
        if not _is_reference(choice) or (isinstance(choice, float) and not isfinite(choice)):
            raise ValueError(f"{choice!r} is neither a number nor a text")
        if isinstance(choice, str):
            checked_template(choice)
    return value


class Answer(GraderSpec):
    """What graders share that look for an answer: where, and what is right."""

    DETERMINISTIC: ClassVar[bool] = True

    input: str = OUTPUT_TEMPLATE
    reference: Any = Field(
        default="{{item.answer}}", description="the right answer, or a list of which any is right"
    )

    _check_input = field_validator("input")(checked_template)
    _check_reference = field_validator("reference")(_checked_reference)


class NumericAnswer(Answer):
    """What graders of numbers share."""

    abs_tol: float = Field(default=0.0, ge=0, description="absolute tolerance")
    rel_tol: float = Field(default=0.0, ge=0, description="tolerance relative to the reference")
    percent: Literal["either", "value", "unit"] = Field(
        default="either",
        description="value: 35% is 0.35; unit: 35% is 35; either: 0.35, or 35 where beyond 1",
    )


class Numeric(NumericAnswer):
    """1 where the answer's number equals the reference's, else 0."""

    type: Literal["numeric"] = "numeric"
    extract: Literal["answer", "last", "first", "only"] = Field(
        default="answer",
        description="answer: the marked or stated answer, else the last number; only: the one"
        " number there is",
    )


class Math(NumericAnswer):
    """1 where the final answer is mathematically the reference, else 0."""

    type: Literal["math"] = "math"


class Gsm8k(Answer):
    """1 where the number after the last `####` equals the reference's, else 0."""

    type: Literal["gsm8k"] = "gsm8k"
    strict: bool = Field(default=False, description="without a #### there is no answer")


class MultipleChoice(Answer):
    """1 where the chosen letters are the reference's, else 0."""

    type: Literal["multiple_choice"] = "multiple_choice"
    choices: str = Field(
        default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$", description="the letters there are"
    )
    options: list[str] | str | None = Field(
        default=None, description="the choices' texts, or a template for a list of them"
    )
    first_index: Literal[0, 1] | None = Field(
        default=None, description="references are numbers, and this is the first choice's"
    )

    @field_validator("options")
    @classmethod
    def _check_options(cls, value: Any) -> Any:
        return checked_template(value) if isinstance(value, str) else value


def _is_reference(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
