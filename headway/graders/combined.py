"""Graders made of graders: `sum`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headway.graders.spec import Combination, unknown_part


class Sum(Combination):
    """The weighted sum of named graders; null when any of them is null."""

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
