"""One item as a grader sees it, and what a builder of graders gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.templates import TemplateError, render
from services.reward.grading.outcome import BadInput, Graded


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion with its data set's row and its prompt."""

    completion: str
    item: Mapping[str, Any]
    prompt: Any


Grade = Callable[[Sample], Graded]
Builder = Callable[[Mapping[str, Any]], Grade]


def value_of(template: str, sample: Sample) -> Any:
    """What a template stands for. BadInput when the item lacks it."""
    try:
        return render(template, sample.completion, sample.item, sample.prompt)
    except TemplateError as error:
        raise BadInput(str(error)) from None


def text_of(template: str, sample: Sample) -> str:
    """The same as a text. BadInput when it is neither a text nor a number."""
    value = value_of(template, sample)
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{template} is {type(value).__name__}, not a text or a number")
    return repr(value)
