"""What all graders share, as data. Grading itself is the reward service's work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, model_validator

from headway.suggestions import near
from headway.templates import OUTPUT, TemplateError, references

OUTPUT_TEMPLATE = f"{{{{{OUTPUT}}}}}"


def checked_template(text: str) -> str:
    """The template itself; ValueError where it can never resolve."""
    try:
        references(text)
    except TemplateError as error:
        raise ValueError(str(error)) from None
    return text


class GraderSpec(BaseModel):
    """One grader. Frozen; refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True
    )
    GRADER_KEYS: ClassVar[tuple[str, ...]] = ()  # keys that hold one grader each
    DETERMINISTIC: ClassVar[bool] = False  # judges by the item alone: no clock, model or chance

    type: str
    name: str | None = Field(default=None, max_length=128, description="for people")
    timeout_s: float | None = Field(
        default=None, gt=0, description="limit for one item; only on the outermost grader"
    )

    def templates(self) -> list[tuple[str, str]]:
        """The templates as (field, template)."""
        found = []
        for field in ("input", "reference"):
            value = getattr(self, field, None)
            texts = value if isinstance(value, list) else [value]
            found += [(field, text) for text in texts if isinstance(text, str)]
        return found

    def needs(self) -> dict[str, str]:
        """What an item must have beside what the templates name: where it is used -> path."""
        return {}

    def parts(self) -> Mapping[str, GraderSpec]:
        """The graders that this one combines, by name."""
        return {}

    def whole_group(self) -> bool:
        """Whether all completions of a prompt are to be scored together, in one go."""
        return any(part.whole_group() for part in self.parts().values())

    def deterministic(self) -> bool:
        """Whether the same item always gets the same reward, so that it may be kept.

        False unless a grader says otherwise of itself, and all of its parts do.
        """
        return self.DETERMINISTIC and all(p.deterministic() for p in self.inner().values())

    def inner(self) -> Mapping[str, GraderSpec]:
        """The same by the path at which each stands below this one."""
        return {f"graders.{name}": part for name, part in self.parts().items()}

    def canonical_json(self) -> str:
        """The grader with all defaults, keys sorted, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


class Combination(GraderSpec):
    """A grader made of named graders."""

    graders: dict[str, SerializeAsAny[GraderSpec]] = Field(min_length=1, max_length=32)

    def parts(self) -> Mapping[str, GraderSpec]:
        """The graders by name."""
        return self.graders

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for name in self.graders:
            if not name.isprintable() or not name or "/" in name:
                raise ValueError(
                    f"graders: {name!r} cannot be a name: empty, with a slash or unprintable"
                )
        check_parts(self.inner())
        return self


def check_parts(inner: Mapping[str, GraderSpec]) -> None:
    """ValueError where a grader within another has what only the outermost may have."""
    for path, part in inner.items():
        if part.timeout_s is not None:
            raise ValueError(f"{path}.timeout_s: set it on the outermost grader")


def unknown_part(name: str, known: Mapping[str, GraderSpec], key: str) -> str:
    """What is said of a name under `key` that none of the combined graders has."""
    return f"{key}.{name} names none of the graders{near(name, known, key + '.')}"
