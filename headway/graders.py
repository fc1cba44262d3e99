"""Graders as a user writes them: JSON in a job or a request. See docs/graders.md.

This module only says what a well-formed grader is, for `headway plan`, the job's
check and the reward service alike; grading itself is the service's work.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from headway.errors import InvalidSpec
from headway.templates import OUTPUT, TemplateError, lookup, references

MAX_GRADER_BYTES = 64 << 10
MAX_DEPTH = 8
_OUTPUT = f"{{{{{OUTPUT}}}}}"


def _template(text: str) -> str:
    try:
        references(text)
    except TemplateError as error:
        raise ValueError(str(error)) from None
    return text


def _is_reference(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


class GraderSpec(BaseModel):
    """What all graders share. Frozen; refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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

    def canonical_json(self) -> str:
        """The grader with all defaults, keys sorted, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


class StringCheck(GraderSpec):
    """OpenAI's `string_check`: 1 where the comparison holds, else 0."""

    type: Literal["string_check"] = "string_check"
    operation: Literal["eq", "ne", "like", "ilike"]
    input: str = _OUTPUT
    reference: str = "{{item.answer}}"
    strip: bool = Field(default=False, description="ignore blanks around both sides")

    _check = field_validator("input", "reference")(_template)


class Regex(GraderSpec):
    """1 where the pattern (Python's `re`) matches, else 0."""

    type: Literal["regex"] = "regex"
    pattern: str = Field(max_length=4096)
    match: Literal["search", "full"] = "search"
    ignore_case: bool = False
    multiline: bool = False
    dot_all: bool = False
    input: str = _OUTPUT

    _check = field_validator("input")(_template)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


class Numeric(GraderSpec):
    """1 where the answer's number equals the reference's, else 0."""

    type: Literal["numeric"] = "numeric"
    input: str = _OUTPUT
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

    _check = field_validator("input")(_template)

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
                _template(choice)
        return value


class ReasoningGym(GraderSpec):
    """The score of a reasoning_gym data set's own `score_answer`, from 0 to 1."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str | None = Field(
        default=None, description="default: the item's metadata.source_dataset"
    )
    input: str = _OUTPUT
    extract: Literal["whole", "last_line", "marker", "tag"] = Field(
        default="whole", description="what of the input is the answer; tag: <answer>…</answer>"
    )
    marker: str = Field(default="", description="with extract: marker, what the answer follows")
    strict: bool = Field(default=False, description="no partial credit: below 1 is 0")

    _check = field_validator("input")(_template)

    @model_validator(mode="after")
    def _marker_fits(self) -> Self:
        if (self.extract == "marker") != bool(self.marker):
            raise ValueError("marker is given with, and only with, extract: marker")
        return self


class Sum(GraderSpec):
    """The weighted sum of named graders; null when any of them is null."""

    type: Literal["sum"] = "sum"
    graders: dict[str, SerializeAsAny[GraderSpec]] = Field(min_length=1, max_length=32)
    weights: dict[str, float] = Field(
        default_factory=dict, description="by name; 1 where not given"
    )

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        for name in self.weights:
            if name not in self.graders:
                hint = _near(name, self.graders, "weights.")
                raise ValueError(f"weights.{name} names none of the graders{hint}")
        for name, part in self.graders.items():
            if not name.isprintable() or not name or "/" in name:
                raise ValueError(
                    f"graders: {name!r} cannot be a name: empty, with a slash or unprintable"
                )
            if part.timeout_s is not None:
                raise ValueError(f"graders.{name}.timeout_s: set it on the outermost grader")
        return self

    def weight(self, name: str) -> float:
        """The weight of a part."""
        return self.weights.get(name, 1.0)


GRADERS: Mapping[str, type[GraderSpec]] = {
    "string_check": StringCheck,
    "regex": Regex,
    "numeric": Numeric,
    "reasoning_gym": ReasoningGym,
    "sum": Sum,
}


def validate_grader(
    spec: object, item: Mapping[str, Any] | None = None, path: str = "grader"
) -> GraderSpec:
    """A grader from plain data; with an item of the data, also that its templates resolve.

    InvalidSpec names each fault's path, which begins with `path`, and, for a misspelt name,
    the nearest known one.
    """
    grader = _parse(spec, path, 0)
    if item is not None:
        _resolves(grader, item, path)
    return grader


def parse_grader_json(text: str) -> GraderSpec:
    """A grader from JSON. InvalidSpec when too long, not JSON or not a grader."""
    if len(text) > MAX_GRADER_BYTES:
        raise InvalidSpec(f"the grader has {len(text)} bytes; at most {MAX_GRADER_BYTES} are taken")
    try:
        return validate_grader(json.loads(text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidSpec(f"the grader is not JSON: {error}") from None


def _parse(raw: object, path: str, depth: int) -> GraderSpec:
    if not isinstance(raw, Mapping):
        raise InvalidSpec(f"{path}: a grader is a JSON object with a type, not {_kind(raw)}")
    if depth > MAX_DEPTH:
        raise InvalidSpec(f"{path}: graders nest at most {MAX_DEPTH} deep")
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in GRADERS:
        known = ", ".join(GRADERS)
        if kind is None:
            raise InvalidSpec(f"{path}: missing key type (one of {known})")
        hint = _near(kind, GRADERS, "") or f" (there are: {known})"
        raise InvalidSpec(f"{path}.type: unknown grader {kind!r}{hint}")
    model, fields = GRADERS[kind], dict(raw)
    if model is Sum and isinstance(raw.get("graders"), Mapping):
        fields["graders"] = {
            name: _parse(part, f"{path}.graders.{name}", depth + 1)
            for name, part in raw["graders"].items()
        }
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidSpec("; ".join(_explain(e, model, path) for e in error.errors())) from None


def _explain(error: Any, model: type[GraderSpec], path: str) -> str:
    where = ".".join([path, *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where}{_near(str(error['loc'][-1]), model.model_fields, path + '.')}"
    if error["type"] == "missing":
        return f"missing key {where}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", message)
        message += f"; not {error['input']!r}" + _near(error["input"], choices, "")
    return f"{where}: {message}"


def _resolves(grader: GraderSpec, item: Mapping[str, Any], path: str) -> None:
    if isinstance(grader, Sum):
        for name, part in grader.graders.items():
            _resolves(part, item, f"{path}.graders.{name}")
        return
    wanted = {
        f"{path}.{field}": reference
        for field, template in grader.templates()
        for reference in references(template)
        if reference.startswith("item")
    }
    if isinstance(grader, ReasoningGym):
        wanted[f"{path} (reasoning_gym)"] = "item.answer"
        if grader.dataset is None:
            wanted[f"{path}.dataset"] = "item.metadata.source_dataset"
    for where, reference in wanted.items():
        try:
            lookup(reference, "", item)
        except TemplateError as error:
            raise InvalidSpec(f"{where}: {error}") from None


def _near(name: str, known: Any, prefix: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
