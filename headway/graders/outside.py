"""What graders that ask somebody else share, and two of them: `reward_model` and `remote`.

Where they ask is the operator's business: a spec names an endpoint of the service's settings,
or a URL that the service allows. Keys are never in a spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from headway.graders.spec import OUTPUT_TEMPLATE, GraderSpec, checked_template

MAX_URL_CHARACTERS = 2000
OUTSIDE_TYPES = frozenset({"judge", "reward_model", "remote"})
_OF_OPENAI = {"score_model", "label_model"}  # a judge in OpenAI's documents


class Outside(GraderSpec):
    """A grader whose answer comes over the network."""

    endpoint: str | None = Field(
        default=None, max_length=128, description="name of an endpoint of the service's settings"
    )
    url: str | None = Field(
        default=None,
        max_length=MAX_URL_CHARACTERS,
        description="instead of endpoint: a URL that the service allows (--allow-url)",
    )
    try_timeout_s: float = Field(default=60.0, gt=0, le=3600, description="limit for one request")
    patience_s: float = Field(
        default=300.0, ge=0, le=3600, description="how long an endpoint that fails is asked again"
    )
    cache: bool = Field(default=True, description="may the same request be answered from memory")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.endpoint is None) == (self.url is None):
            raise ValueError("name either endpoint or url")
        return self

    def own_templates(self) -> list[tuple[str, str]]:
        """The templates of this type as (field, template)."""
        return []

    def templates(self) -> list[tuple[str, str]]:
        """The templates as (field, template)."""
        return self.own_templates()

    @model_validator(mode="after")
    def _templates_fit(self) -> Self:
        for field, template in self.templates():
            try:
                checked_template(template)
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from None
        return self


class RewardModel(Outside):
    """The score of a classifier behind a vLLM server: /classify, /score or /pooling."""

    type: Literal["reward_model"] = "reward_model"
    model: str | None = Field(default=None, description="default: the endpoint's")
    api: Literal["classify", "score", "pooling"] = "classify"
    input: str = Field(default=OUTPUT_TEMPLATE, description="the text that is scored")
    query: str = Field(
        default="{{prompt}}", description="with api: score, what the input is an answer to"
    )
    as_chat: bool = Field(
        default=False, description="send the prompt's messages and the input as the assistant's"
    )
    label: int | None = Field(
        default=None, ge=0, description="of several scores, the number of the one (from 0)"
    )
    over_tokens: Literal["last", "mean", "min", "max", "product"] = Field(
        default="last", description="with api: pooling, what becomes of a score for each token"
    )
    extra: dict[str, JsonValue] = Field(
        default_factory=dict, description="more keys of the request, such as use_activation"
    )

    def own_templates(self) -> list[tuple[str, str]]:
        """Input and query."""
        return [("input", self.input), ("query", self.query)]

    @field_validator("extra")
    @classmethod
    def _extra_fits(cls, extra: dict[str, Any]) -> dict[str, Any]:
        return checked_extra(extra, {"model", "input", "messages", "text_1", "text_2"})

    @model_validator(mode="after")
    def _api_fits(self) -> Self:
        if self.as_chat and self.api == "score":
            raise ValueError("as_chat: api score takes texts; use classify or pooling")
        if self.label is not None and self.api == "score":
            raise ValueError("label: api score gives one score")
        return self


class Remote(Outside):
    """The reward that a server of one's own gives (docs/graders.md has what travels)."""

    type: Literal["remote"] = "remote"
    send: list[Literal["completion", "item", "prompt"]] = Field(
        default=["completion", "item", "prompt"], min_length=1, description="what of an item"
    )
    batch_size: int = Field(default=1, ge=1, le=1024, description="most items in one request")
    body: JsonValue = Field(
        default=None, description="instead: a request of one's own, with templates in its texts"
    )
    field: str | None = Field(
        default=None, description="with body: where the answer has its number, such as data.0.score"
    )

    def own_templates(self) -> list[tuple[str, str]]:
        """Every text of the body."""
        return [(f"body{path}", text) for path, text in texts_of(self.body)]

    @model_validator(mode="after")
    def _body_fits(self) -> Self:
        if (self.body is None) != (self.field is None):
            raise ValueError("body and field are given together")
        if self.body is not None and self.batch_size != 1:
            raise ValueError("batch_size: a body of one's own holds one item")
        return self


def checked_extra(extra: dict[str, Any], ours: set[str]) -> dict[str, Any]:
    """The extra keys of a request; ValueError where one has a key of its own."""
    for name in extra:
        if name in ours or name in ("stream", "n"):
            raise ValueError(f"{name} is not set in extra")
    return extra


def texts_of(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text within plain data, with where it stands."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_of(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from texts_of(inner, f"{path}.{number}")


def outside_limit_s(spec: object, num_items: int) -> float:
    """Seconds that what a grader (plain data) asks outside may take for so many items, at most.

    As if each request came after the one before, and each took all that it may.
    """
    total, waiting = 0.0, [spec]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        for value in part.values():
            waiting += value if isinstance(value, list) else [value]
        if part.get("type") in OUTSIDE_TYPES | _OF_OPENAI:
            num_requests = num_items * _number(part, "samples", 1)
            total += _number(part, "patience_s", 300) + num_requests * _number(
                part, "try_timeout_s", 60
            )
    return total


def _number(spec: Mapping[str, Any], key: str, default: float) -> float:
    value = spec.get(key)
    return float(value) if isinstance(value, int | float) else default
