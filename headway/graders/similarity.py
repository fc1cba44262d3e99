"""Graders that say how alike two texts are: `text_similarity`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from headway.graders.spec import OUTPUT_TEMPLATE, GraderSpec, checked_template

Metric = Literal[
    "fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"
]
LEFT_OUT = {
    "cosine": "it compares embeddings, which want a model: serve one and ask it with `remote`",
    "meteor": "it counts synonyms, for which WordNet would have to be downloaded: rouge_l is near",
}


class TextSimilarity(GraderSpec):
    """OpenAI's `text_similarity`: how alike the text and the reference are, from 0 to 1."""

    DETERMINISTIC: ClassVar[bool] = True

    type: Literal["text_similarity"] = "text_similarity"
    evaluation_metric: Metric
    input: str = OUTPUT_TEMPLATE
    reference: str | list[str] = Field(
        default="{{item.answer}}", description="a text, or several of which the likest counts"
    )

    @field_validator("evaluation_metric", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        if isinstance(value, str) and value in LEFT_OUT:
            raise ValueError(f"{value} is not to be had: {LEFT_OUT[value]}")
        return value

    @field_validator("input", "reference")
    @classmethod
    def _check(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("empty: name at least one")
        for template in [value] if isinstance(value, str) else value:
            checked_template(template)
        return value
