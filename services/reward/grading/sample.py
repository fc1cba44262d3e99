"""One item as a grader sees it, and what a builder of graders gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway.templates import NotInOutput, TemplateError, render
from services.reward.grading.outcome import BadInput, Graded, NoAnswer


@dataclass(slots=True)
class Memory:
    """What an item brings with it when it is graded once more (`services.reward.grading.asking`).

    `answers`: to what was asked outside, by key, one entry a sample. `kept`: what its parts came
    to, by the digest of their spec; parts add to it.
    """

    answers: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    kept: dict[str, Graded] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion with its data set's row and its prompt.

    `group`: all samples of its prompt in order, itself at `position`, where the grader is one
    of whole groups; else empty.
    """

    completion: str
    item: Mapping[str, Any]
    prompt: Any
    group: Sequence[Sample] = field(default=(), repr=False, compare=False)
    position: int = 0
    num_tokens: int | None = None  # of the completion, where the caller said
    memory: Memory = field(default_factory=Memory, repr=False, compare=False)


def as_group(samples: list[Sample]) -> list[Sample]:
    """The samples of one prompt, each of which knows all; one alone stays as it is."""
    if len(samples) == 1:
        return samples
    group: list[Sample] = []
    for position, sample in enumerate(samples):
        group.append(replace(sample, group=group, position=position))
    return group


Grade = Callable[[Sample], Graded]
Builder = Callable[[Mapping[str, Any]], Grade]


def value_of(template: str, sample: Sample) -> Any:
    """What a template stands for. BadInput when the item lacks it, NoAnswer when the completion."""
    try:
        return render(template, sample.completion, sample.item, sample.prompt)
    except NotInOutput as error:
        raise NoAnswer(str(error)) from None
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
