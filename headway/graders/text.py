"""Graders that look at the text as it is: `string_check` and `regex`."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from headway.graders.spec import OUTPUT_TEMPLATE, GraderSpec, checked_template


class StringCheck(GraderSpec):
    """OpenAI's `string_check`: 1 where the comparison holds, else 0."""

    DETERMINISTIC: ClassVar[bool] = True

    type: Literal["string_check"] = "string_check"
    operation: Literal["eq", "ne", "like", "ilike"]
    input: str = OUTPUT_TEMPLATE
    reference: str = "{{item.answer}}"
    strip: bool = Field(default=False, description="ignore blanks around both sides")

    _check = field_validator("input", "reference")(checked_template)


class Regex(GraderSpec):
    """1 where the pattern (Python's `re`) matches, else 0."""

    DETERMINISTIC: ClassVar[bool] = True

    type: Literal["regex"] = "regex"
    pattern: str = Field(max_length=4096)
    match: Literal["search", "full"] = "search"
    ignore_case: bool = False
    multiline: bool = False
    dot_all: bool = False
    input: str = OUTPUT_TEMPLATE

    _check = field_validator("input")(checked_template)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern
