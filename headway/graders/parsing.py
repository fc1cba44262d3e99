"""From plain data to graders, for `headway plan`, the job's check and the service alike."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from headway.errors import Fault, InvalidSpec
from headway.graders.answers import Gsm8k, Math, MultipleChoice, Numeric
from headway.graders.code import Code
from headway.graders.combined import Formula, Gate, Sum
from headway.graders.gym import ReasoningGym
from headway.graders.judge import Judge
from headway.graders.lengths import Length, Overlong
from headway.graders.openai import translated
from headway.graders.outside import Remote, RewardModel
from headway.graders.python import Python
from headway.graders.schemas import JsonSchema
from headway.graders.similarity import TextSimilarity
from headway.graders.spec import Combination, GraderSpec
from headway.graders.text import Regex, StringCheck
from headway.jobspec_errors import section_of
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
    "math": Math,
    "gsm8k": Gsm8k,
    "multiple_choice": MultipleChoice,
    "reasoning_gym": ReasoningGym,
    "code": Code,
    "python": Python,
    "sum": Sum,
    "gate": Gate,
    "formula": Formula,
    "judge": Judge,
    "reward_model": RewardModel,
    "remote": Remote,
}


def validate_grader(
    spec: object, item: Mapping[str, Any] | None = None, path: str = "grader"
) -> GraderSpec:
    """A grader from plain data; with an item of the data, also that its templates resolve.

    InvalidSpec names each fault's path, which begins with `path`, and, for a misspelt name,
    the nearest known one; its `faults` has them one by one.
    """
    grader = _parse(spec, path, 0)
    if item is not None and (faults := _unresolved(grader, item, path)):
        raise InvalidSpec(faults=faults)
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
        raise _fault(path, f"{path}: a grader is a JSON object with a type, not {_kind(raw)}")
    raw = translated(raw, path)
    if depth > MAX_DEPTH:
        raise _fault(path, f"{path}: graders nest at most {MAX_DEPTH} deep")
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in GRADERS:
        known = ", ".join(GRADERS)
        if kind is None:
            raise _fault(f"{path}.type", f"{path}: missing key type (one of {known})")
        hint = near(str(kind), GRADERS) or f" (there are: {known})"
        raise _fault(f"{path}.type", f"{path}.type: unknown grader {kind!r}{hint}")
    model, fields = GRADERS[kind], dict(raw)
    within = [(fields, key, key) for key in model.GRADER_KEYS if key in raw]
    if issubclass(model, Combination) and isinstance(raw.get("graders"), Mapping):
        named = fields["graders"] = dict(raw["graders"])
        within += [(named, name, f"graders.{name}") for name in named]
    faults: list[Fault] = []
    for holder, key, where in within:
        try:
            holder[key] = _parse(holder[key], f"{path}.{where}", depth + 1)
        except InvalidSpec as error:
            faults += error.faults or [Fault(f"{path}.{where}", str(error))]
    if faults:
        raise InvalidSpec(faults=faults)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidSpec(faults=[_explained(e, model, path) for e in error.errors()]) from None


def _fault(path: str, message: str) -> InvalidSpec:
    return InvalidSpec(faults=[Fault(path, message)])


def _explained(error: Any, model: type[GraderSpec], path: str) -> Fault:
    where = ".".join([path, *(str(part) for part in error["loc"])])
    return Fault(where, _explain(error, model, path, where))


def _explain(error: Any, model: type[GraderSpec], path: str, where: str) -> str:
    if error["type"] == "extra_forbidden":
        holder = ".".join([path, *(str(part) for part in error["loc"][:-1])])
        known = _keys_at(model, error["loc"][:-1])
        return f"unknown key {where}{near(str(error['loc'][-1]), known, holder + '.')}"
    if error["type"] == "missing":
        return f"missing key {where}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", message)
        message += f"; not {error['input']!r}" + near(error["input"], choices)
    return f"{where}: {message}"


def _keys_at(model: type[BaseModel], place: tuple[str | int, ...]) -> list[str]:
    """The keys, as they are written, of what stands at a place within a grader."""
    for part in place:
        if isinstance(part, str):
            named = {field.alias or name: field for name, field in model.model_fields.items()}
            inner = section_of(named[part].annotation) if part in named else None
            if inner is None:
                return []
            model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _unresolved(grader: GraderSpec, item: Mapping[str, Any], path: str) -> list[Fault]:
    faults = [
        fault
        for where, part in grader.inner().items()
        for fault in _unresolved(part, item, f"{path}.{where}")
    ]
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
            faults.append(Fault(where, f"{where}: {error}"))
    return faults


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
