"""Is this a grader that the service would score with? For requests, and for `validate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headway.errors import Fault, InvalidSpec
from headway.graders import GRADERS, GraderSpec, parse_grader_json, validate_grader
from headway.schemas import grader_schemas


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grader with its defaults, or all that is wrong with it."""

    grader: dict[str, Any] | None
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class GraderType:
    """A type of graders: what it does, and the JSON schema of one."""

    type: str
    description: str
    schema: dict[str, Any]


def accepted(grader_json: str, max_timeout_s: float) -> GraderSpec:
    """The grader of a request. InvalidSpec when it is none, or asks for more time than there is."""
    grader = _parsed(grader_json)
    if grader.timeout_s is not None and grader.timeout_s > max_timeout_s:
        message = (
            f"grader.timeout_s {grader.timeout_s:g} exceeds this service's limit of"
            f" {max_timeout_s:g} s"
        )
        raise InvalidSpec(faults=[Fault("grader.timeout_s", message)])
    return grader


def verdict_of(
    grader_json: str,
    item: Mapping[str, Any] | None,
    max_timeout_s: float,
    check: Callable[[GraderSpec], object],
) -> Verdict:
    """What a request with this grader, and this item of the data, would come to.

    `check` raises InvalidSpec when the grader asks outside where it may not.
    """
    try:
        grader = accepted(grader_json, max_timeout_s)
        check(grader)
        if item is not None:
            validate_grader(json.loads(grader_json), item)
    except InvalidSpec as error:
        return Verdict(None, error.faults or (Fault("grader", str(error)),))
    return Verdict(grader.model_dump(mode="json"))


@lru_cache(maxsize=1)
def grader_types() -> tuple[GraderType, ...]:
    """All types that there are."""
    return tuple(
        GraderType(name, " ".join((GRADERS[name].__doc__ or "").split()), schema)
        for name, schema in grader_schemas().items()
    )


@lru_cache(maxsize=256)
def _parsed(grader_json: str) -> GraderSpec:
    return parse_grader_json(grader_json)
