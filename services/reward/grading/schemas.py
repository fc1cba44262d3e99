"""The `json_schema` grader: is the text JSON, and does a schema accept it?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from services.reward.grading.outcome import Graded
from services.reward.grading.sample import Grade, Sample, text_of

_MAX_DEPTH = 64  # of a completion's JSON: beyond, it is taken for none
_FENCE = "```"


def json_schema(spec: Mapping[str, Any]) -> Grade:
    """Loads the validator; a reference to what the schema does not hold was refused before."""
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    schema = spec["schema"]
    validator = validator_for(schema)(schema, registry=REGISTRY)

    def grade(sample: Sample) -> Graded:
        for candidate in _candidates(text_of(spec["input"], sample), spec["extract"]):
            found = _parsed(candidate)
            if found is not None:
                return Graded(float(validator.is_valid(found[0])))
        return Graded(0.0)

    return grade


def _candidates(text: str, extract: str) -> list[str]:
    said = text.rpartition("</think>")[2]  # reasoning does not count, but JSON may quote the mark
    whole = [text, said] if extract != "fenced" else []
    block = _last_block(said.partition("<think>")[0]) if extract != "whole" else None
    return whole if block is None else [*whole, block]


def _last_block(text: str) -> str | None:
    """The content of the last closed block between lines of three backticks."""
    found = None
    inside: list[str] | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if inside is None:
            inside = [] if mark.startswith(_FENCE) else None
        elif mark == _FENCE:
            found, inside = "\n".join(inside), None
        else:
            inside.append(line)
    return found


def _parsed(text: str) -> tuple[Any] | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return (value,) if _is_shallow(value) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return True
    return False
