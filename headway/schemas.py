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
    kinds = []
    for model in GRADERS.values():
        kind = _inlined(model)
        kind["required"] = sorted({"type", *kind.get("required", ())})
        kinds.append(kind)
    return {"type": "object", "anyOf": kinds}


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
