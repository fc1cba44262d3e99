"""Graders made of graders: `sum`, `gate` and `formula`."""

from __future__ import annotations

from collections.abc import Mapping
from keyword import iskeyword
from typing import ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from headway.arithmetic import FUNCTIONS, compiled
from headway.graders.spec import Combination, GraderSpec, check_parts, unknown_part


class Sum(Combination):
    """The weighted sum of named graders; null when any of them is null."""

    DETERMINISTIC: ClassVar[bool] = True

    type: Literal["sum"] = "sum"
    weights: dict[str, float] = Field(
        default_factory=dict, description="by name; 1 where not given"
    )

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        for name in self.weights:
            if name not in self.graders:
                raise ValueError(unknown_part(name, self.graders, "weights"))
        return self

    def weight(self, name: str) -> float:
        """The weight of a part."""
        return self.weights.get(name, 1.0)


class Gate(GraderSpec):
    """What `then` gives where `condition` reaches the threshold; elsewhere `else`.

    Where the condition fails, `then` is not evaluated; null when what is evaluated is null.
    """

    DETERMINISTIC: ClassVar[bool] = True

    type: Literal["gate"] = "gate"
    condition: SerializeAsAny[GraderSpec]
    threshold: float = Field(default=1.0, description="the least reward that opens the gate")
    then: SerializeAsAny[GraderSpec]
    otherwise: float = Field(default=0.0, alias="else", description="the reward elsewhere")

    GRADER_KEYS: ClassVar[tuple[str, ...]] = ("condition", "then")

    def parts(self) -> Mapping[str, GraderSpec]:
        """Condition and then."""
        return {"condition": self.condition, "then": self.then}

    def inner(self) -> Mapping[str, GraderSpec]:
        """The same: they stand under their own keys."""
        return self.parts()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        check_parts(self.inner())
        return self


class Formula(Combination):
    """An arithmetic expression over named graders; null when any of them is null."""

    DETERMINISTIC: ClassVar[bool] = True

    type: Literal["formula"] = "formula"
    formula: str = Field(description="such as: 0.7 * right + 0.3 * min(style, 1)")

    @field_validator("graders")
    @classmethod
    def _names_fit(cls, graders: dict[str, GraderSpec]) -> dict[str, GraderSpec]:
        for name in graders:
            if not (name.isidentifier() and name.isascii()) or iskeyword(name) or name in FUNCTIONS:
                raise ValueError(
                    f"{name!r} cannot stand in a formula: letters, digits and _, and no function"
                )
        return graders

    @model_validator(mode="after")
    def _formula_fits(self) -> Self:
        compiled(self.formula, self.graders)
        return self
