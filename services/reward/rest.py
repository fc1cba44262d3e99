"""The REST door: score, validate, graders. The same requests as gRPC's, with items as objects."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from headway.errors import sayable
from headway.messages import Score
from headway.schemas import grader_schema
from headway.web import ErrorAnswer
from services.reward.checking import grader_types
from services.reward.request import Request
from services.reward.scoring import Scorer
from services.reward.waiting import WireItem


class ScoreItemBody(BaseModel):
    """One completion to score."""

    model_config = ConfigDict(extra="forbid")

    completion: str
    item: dict[str, Any] = Field(default_factory=dict, description="the data set's row")
    prompt: Any = Field(default=None, description="chat messages or text")
    group: str = Field(default="", description="the same for all completions of one prompt")
    num_tokens: int | None = Field(
        default=None, ge=0, lt=1 << 32, description="of the completion, for what counts tokens"
    )


class ScoreBody(BaseModel):
    """A batch of completions and how to score them."""

    model_config = ConfigDict(extra="forbid")

    grader: Annotated[dict[str, Any], WithJsonSchema(grader_schema())]
    items: list[ScoreItemBody]
    request_id: str = Field(default="", description="a repeat gives the same answer")
    job_id: str = ""


class ScoreResultBody(BaseModel):
    """The score of one completion; `reward` is null when there is an error."""

    reward: float | None
    parts: dict[str, float]
    error_kind: str
    error_message: str
    duration_s: float


class ScoreAnswer(BaseModel):
    """One result an item, in order."""

    results: list[ScoreResultBody]


class ValidateBody(BaseModel):
    """A grader to check, and an item of the data that it is to fit."""

    model_config = ConfigDict(extra="forbid")

    grader: Annotated[Any, WithJsonSchema(grader_schema())]
    item: dict[str, Any] | None = Field(default=None, description="the data set's row")


class FaultBody(BaseModel):
    """What is wrong with a key of a grader; the message names the nearest known one."""

    path: str
    message: str


class ValidateAnswer(BaseModel):
    """The grader with all its defaults, or null and all its faults."""

    grader: dict[str, Any] | None
    faults: list[FaultBody]


class GraderTypeBody(BaseModel):
    """A type of graders and the JSON schema of such a grader."""

    type: str
    description: str
    json_schema: dict[str, Any] = Field(serialization_alias="schema")


class GradersAnswer(BaseModel):
    """All types."""

    graders: list[GraderTypeBody]


_BUSY: dict[int | str, dict[str, Any]] = {
    429: {"model": ErrorAnswer, "description": "Too much waits; Retry-After says until when"},
    504: {"model": ErrorAnswer, "description": "Not scored within an hour"},
}


def add_routes(app: FastAPI, scorer: Scorer) -> None:
    """Adds POST /v1/score, POST /v1/validate and GET /v1/graders."""

    @app.post("/v1/validate", summary="Check a grader without scoring")
    async def validate(body: ValidateBody) -> ValidateAnswer:
        verdict = scorer.validate(json.dumps(body.grader), body.item)
        faults = [
            FaultBody(path=sayable(fault.path), message=sayable(fault.message))
            for fault in verdict.faults
        ]
        return ValidateAnswer(grader=verdict.grader, faults=faults)

    @app.get("/v1/graders", summary="The types of graders")
    async def graders() -> GradersAnswer:
        return GradersAnswer(
            graders=[
                GraderTypeBody(type=t.type, description=t.description, json_schema=t.schema)
                for t in grader_types()
            ]
        )

    @app.post("/v1/score", summary="Score completions", responses=_BUSY)
    async def score(body: ScoreBody) -> ScoreAnswer:
        items = [_wire_item(item) for item in body.items]
        grader_json = json.dumps(body.grader)
        scores = await scorer.score(Request(body.request_id, body.job_id, grader_json, items))
        return ScoreAnswer(results=[_result(score) for score in scores])


def _wire_item(item: ScoreItemBody) -> WireItem:
    prompt_json, item_json = json.dumps(item.prompt), json.dumps(item.item)
    return WireItem(prompt_json, item.completion, item_json, item.group, item.num_tokens)


def _result(score: Score) -> ScoreResultBody:
    return ScoreResultBody(
        reward=score.reward,
        parts=dict(score.parts),
        error_kind=score.error_kind,
        error_message=score.error_message,
        duration_s=score.duration_s,
    )
