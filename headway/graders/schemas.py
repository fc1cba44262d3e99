"""Graders of JSON that a model writes: `json_schema`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from headway.graders.spec import OUTPUT_TEMPLATE, GraderSpec, checked_template

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # pydantic's own, deprecated `schema` is hidden

    class JsonSchema(GraderSpec):
        """1 where the text is JSON that a schema accepts, else 0."""

        DETERMINISTIC: ClassVar[bool] = True

        type: Literal["json_schema"] = "json_schema"
        schema: dict[str, Any] = Field(  # type: ignore[assignment]
            description="a JSON schema; draft 2020-12 unless its $schema says otherwise"
        )
        extract: Literal["auto", "whole", "fenced"] = Field(
            default="auto",
            description="what is read: the whole text, the last fenced block, or (auto) the block"
            " where the whole is no JSON",
        )
        input: str = OUTPUT_TEMPLATE

        _template = field_validator("input")(checked_template)

        @field_validator("schema")
        @classmethod
        def _usable(cls, schema: dict[str, Any]) -> dict[str, Any]:
            try:
                _check_schema(schema)
                _check_references(schema)
            except RecursionError:
                raise ValueError("nested too deep") from None
            return schema


def _check_schema(schema: dict[str, Any]) -> None:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    draft = validator_for(schema, default=None)  # type: ignore[arg-type]  # the stub is narrower
    if "$schema" in schema and draft is None:
        raise ValueError(f"$schema {str(schema['$schema'])[:200]!r} is no draft that is known")
    try:
        (draft or validator_for({})).check_schema(schema)
    except SchemaError as error:
        where = ".".join(str(part) for part in error.path)
        raise ValueError(f"{where + ': ' if where else ''}{error.message[:500]}") from None


def _check_references(schema: dict[str, Any]) -> None:
    """ValueError for a reference to what is neither in the schema nor a known draft."""
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    root = Resource.from_contents(schema, default_specification=DRAFT202012)
    pending = [(REGISTRY.resolver_with_root(root), root)]
    while pending:
        resolver, resource = pending.pop()
        contents: Any = resource.contents
        for key in _REFERENCES if isinstance(contents, Mapping) else ():
            target = contents.get(key)
            try:
                if isinstance(target, str):
                    resolver.lookup(target)
            except Unresolvable:
                raise ValueError(
                    f"{key} {target[:200]!r} is not in the schema, and nothing is fetched"
                ) from None
        pending += [(resolver.in_subresource(part), part) for part in resource.subresources()]
