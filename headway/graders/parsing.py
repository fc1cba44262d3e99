"""From plain data to graders, for `headway plan`, the job's check and the service alike."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from headway.errors import InvalidSpec
from headway.graders.answers import Numeric
from headway.graders.code import Code
from headway.graders.combined import Formula, Gate, Sum
from headway.graders.gym import ReasoningGym
from headway.graders.lengths import Length, Overlong
from headway.graders.schemas import JsonSchema
from headway.graders.similarity import TextSimilarity
from headway.graders.spec import Combination, GraderSpec
from headway.graders.text import Regex, StringCheck
from headway.suggestions import near
from headway.templates import TemplateError, lookup, references

MAX_GRADER_BYTES = 64 << 10
MAX_DEPTH = 8

GRADERS: dict[str, type[GraderSpec]] = {
    "string_check": StringCheck,
    "regex": Regex,
    "text_similarity": TextSimilarity,
    "json_schema": JsonSchema,
    "length": Length,
    "overlong": Overlong,
    "numeric": Numeric,
    "reasoning_gym": ReasoningGym,
    "code": Code,
    "sum": Sum,
    "gate": Gate,
    "formula": Formula,
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
        hint = near(kind, GRADERS) or f" (there are: {known})"
        raise InvalidSpec(f"{path}.type: unknown grader {kind!r}{hint}")
    model, fields = GRADERS[kind], dict(raw)
    if issubclass(model, Combination) and isinstance(raw.get("graders"), Mapping):
        fields["graders"] = {
            name: _parse(part, f"{path}.graders.{name}", depth + 1)
            for name, part in raw["graders"].items()
        }
    for key in model.GRADER_KEYS:
        if key in raw:
            fields[key] = _parse(raw[key], f"{path}.{key}", depth + 1)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidSpec("; ".join(_explain(e, model, path) for e in error.errors())) from None


def _explain(error: Any, model: type[GraderSpec], path: str) -> str:
    where = ".".join([path, *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where}{near(str(error['loc'][-1]), model.model_fields, path + '.')}"
    if error["type"] == "missing":
        return f"missing key {where}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", message)
        message += f"; not {error['input']!r}" + near(error["input"], choices)
    return f"{where}: {message}"


def _resolves(grader: GraderSpec, item: Mapping[str, Any], path: str) -> None:
    for where, part in grader.inner().items():
        _resolves(part, item, f"{path}.{where}")
    wanted = {
        f"{path}.{field}": reference
        for field, template in grader.templates()
        for reference in references(template)
        if reference.startswith("item")
    }
    wanted |= {path + where: reference for where, reference in grader.needs().items()}
    for where, reference in wanted.items():
        try:
            lookup(reference, "", item)
        except TemplateError as error:
            raise InvalidSpec(f"{where}: {error}") from None


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
