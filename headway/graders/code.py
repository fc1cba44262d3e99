"""The grader `code`: a program from the completion, run against tests in the sandbox."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headway.graders.spec import OUTPUT_TEMPLATE, GraderSpec, checked_template


class Code(GraderSpec):
    """1 where the program of the completion passes its tests, else 0; or the share it passes."""

    type: Literal["code"] = "code"
    input: str = OUTPUT_TEMPLATE
    language: Literal["python"] = "python"
    extract: Literal["block", "whole"] = Field(
        default="block", description="block: the last fenced block, else the whole; or the whole"
    )
    prefix: str = Field(default="", description="what stands before the program")
    cases: Any = Field(
        default=None, description="inputs with their outputs, or arguments with what is expected"
    )
    tests: Any = Field(default=None, description="a text of asserts or unit tests, or a list")
    function: str | None = Field(default=None, description="what cases with arguments call")
    score: Literal["all", "fraction"] = Field(
        default="all", description="all: 1 if every test passes; fraction: the share that does"
    )
    tolerance: float = Field(
        default=0.0, ge=0, description="of numbers, absolute and relative; 0: compare as they are"
    )
    time_limit_s: int = Field(
        default=4, ge=1, le=120, description="CPU seconds of a case; by the clock twice that"
    )
    memory_mib: int = Field(default=512, ge=64, le=8192)
    packages: list[str] = Field(
        default_factory=list, max_length=16, description="packages a program may import: numpy, ..."
    )

    _check = field_validator("input", "prefix")(checked_template)

    @field_validator("cases", "tests", "function")
    @classmethod
    def _check_texts(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str):
                checked_template(part)
        return value

    @field_validator("packages")
    @classmethod
    def _names(cls, packages: list[str]) -> list[str]:
        for name in packages:
            if not name.isidentifier() or name in ("headway", "services"):
                raise ValueError(f"{name!r} is no package that programs may import")
        return packages

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.cases is None) == (self.tests is None):
            raise ValueError("name either cases or tests, such as cases: '{{item.cases}}'")
        if self.timeout_s is not None and self.timeout_s < self.time_limit_s + 2:
            raise ValueError("timeout_s is for all cases together: at least time_limit_s + 2")
        return self

    def templates(self) -> list[tuple[str, str]]:
        """The templates as (field, template)."""
        fields = {
            name: getattr(self, name) for name in ("input", "prefix", "cases", "tests", "function")
        }
        return [(name, text) for name, text in fields.items() if isinstance(text, str) and text]
