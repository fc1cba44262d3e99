"""What every section of a job has: frozen, and unknown keys refused."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_END_OF_INTEGERS = 2**31

Gib = Annotated[float, Field(le=1 << 20)]
"""An amount of memory or disk in GiB, up to what can be multiplied without care."""


class Section(BaseModel):
    """A frozen part of a job that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _can_be_counted(self) -> Self:
        # The ledger's scripts count in doubles, and data sets are indexed by machine words.
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int) and value >= _END_OF_INTEGERS:
                raise ValueError(f"{name} {value} is not below {_END_OF_INTEGERS}")
        return self
