"""JSON schemas for OpenAPI: a job and a grader, with nothing referred to elsewhere."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from headway.graders import GRADERS
from headway.jobs import JOB_ID
from headway.jobspec import JobSpec


def job_schema() -> dict[str, Any]:
    """A job as it is submitted."""
    schema = _inlined(JobSpec)
    schema["properties"]["job_id"] = {"type": "string", "pattern": f"^{JOB_ID.pattern}$"}
    schema["properties"]["reward"]["properties"]["grader"] = grader_schema()
    return schema


def grader_schema() -> dict[str, Any]:
    """A grader of any type. Graders inside of another are shown as objects only."""
    return {"type": "object", "anyOf": list(grader_schemas().values())}


def grader_schemas() -> dict[str, dict[str, Any]]:
    """The schema of each type of graders, by name."""
    kinds = {name: _inlined(model) for name, model in GRADERS.items()}
    for kind in kinds.values():
        kind["required"] = sorted({"type", *kind.get("required", ())})
    return kinds


def _inlined(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    whole: dict[str, Any] = _without_references(schema, schema.pop("$defs", {}))
    return whole


def _without_references(schema: Any, parts: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_without_references(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _without_references(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {key: _without_references(item, parts) for key, item in schema.items()}
