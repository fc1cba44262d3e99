"""The grader `python`: a function of the user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, JsonValue, model_validator

from headway.graders.signatures import WHOLE_GROUP, Call, Unclear, call_of, chosen, functions_of
from headway.graders.spec import GraderSpec

MAX_SOURCE_BYTES = 48 << 10
_CALLS = (*get_args(Call), "auto")


class Python(GraderSpec):
    """What a function of the user's own gives; see `headway.graders.signatures`.

    `function` and `call` hold what was found in the source where the user left it open.
    """

    type: Literal["python"] = "python"
    source: str = Field(
        max_length=MAX_SOURCE_BYTES,
        description="Python; in a job file also `path`, a file that is read when the job is sent",
    )
    file: str = Field(
        default="function.py", max_length=200, description="what messages call the source"
    )
    function: str = Field(
        default="", description="default: the only one, or compute_score, or grade"
    )
    call: Literal["auto", "verl", "verl_batch", "trl", "rubric", "rubric_group", "openai"] = Field(
        default="auto", description="whose signature it has; auto: by its arguments' names"
    )
    kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="more arguments, the same for every item"
    )
    sandbox: bool = Field(
        default=True,
        description="false: outside the sandbox, on a service with --trust-functions only",
    )

    def whole_group(self) -> bool:
        """Whether the function takes lists."""
        return self.call in WHOLE_GROUP

    @model_validator(mode="before")
    @classmethod
    def _found_in_source(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        if "path" in raw:
            raise ValueError(
                "path is read where a job is written (headway plan, run, submit, eval): a request"
                " has the file's text under source"
            )
        source, name, call = raw.get("source"), raw.get("function"), raw.get("call", "auto")
        if not isinstance(source, str) or len(source) > MAX_SOURCE_BYTES or call not in _CALLS:
            return raw  # said of its own key
        functions = _said_of("source", functions_of, source)
        if name is None or name == "":
            name = _said_of("function", chosen, functions, None)
        if not isinstance(name, str):
            return raw
        if call == "auto":
            call = _said_of("call", call_of, functions, name)
        return {**raw, "function": name, "call": call}

    @model_validator(mode="after")
    def _kwargs_fit(self) -> Python:
        for name in self.kwargs:
            if not name.isidentifier():
                raise ValueError(f"kwargs: {name!r} is no name of an argument")
        if len(json.dumps(self.kwargs)) > MAX_SOURCE_BYTES:
            raise ValueError(f"kwargs: at most {MAX_SOURCE_BYTES} bytes")
        return self


def _said_of(key: str, read: Any, *values: Any) -> Any:
    try:
        return read(*values)
    except Unclear as error:
        raise ValueError(f"{key}: {error}") from None
