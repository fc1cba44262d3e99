"""From a grader's plain data to a function that grades one item."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.templates import TemplateError, render
from services.reward.grading.numeric import grade_numeric
from services.reward.grading.outcome import BadInput, Graded, GradingError, checked_reward


@dataclass(frozen=True, slots=True)
class Sample:
    """One item as a grader sees it."""

    completion: str
    item: Mapping[str, Any]
    prompt: Any


Grade = Callable[[Sample], Graded]
Builder = Callable[[Mapping[str, Any]], Grade]


_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}


def build(spec: Mapping[str, Any]) -> Grade:
    """The function of a validated grader. What is slow to load is loaded here."""
    kind = spec["type"]
    builder = BUILDERS.get(kind)
    if builder is None:
        raise GradingError(f"this service has no grader {kind!r}")
    return builder(spec)


def _string_check(spec: Mapping[str, Any]) -> Grade:
    compare = _COMPARISONS[spec["operation"]]

    def grade(sample: Sample) -> Graded:
        text, reference = _text(spec["input"], sample), _text(spec["reference"], sample)
        if spec["strip"]:
            text, reference = text.strip(), reference.strip()
        return Graded(float(compare(text, reference)))

    return grade


def _regex(spec: Mapping[str, Any]) -> Grade:
    options = (("ignore_case", re.I), ("multiline", re.M), ("dot_all", re.S))
    flags = re.NOFLAG
    for option, flag in options:
        flags |= flag if spec[option] else re.NOFLAG
    pattern = re.compile(spec["pattern"], flags)
    matches = pattern.fullmatch if spec["match"] == "full" else pattern.search
    return lambda sample: Graded(float(matches(_text(spec["input"], sample)) is not None))


def _numeric(spec: Mapping[str, Any]) -> Grade:
    fields = dict(spec)

    def grade(sample: Sample) -> Graded:
        reference = spec["reference"]
        choices = reference if isinstance(reference, list) else [reference]
        values: list[Any] = []
        for choice in choices:
            value = _value(choice, sample) if isinstance(choice, str) else choice
            values += value if isinstance(value, list) else [value]
        if not values:
            raise BadInput("the item's list of right answers is empty")
        return Graded(grade_numeric(_text(spec["input"], sample), values, fields))

    return grade


def _reasoning_gym(spec: Mapping[str, Any]) -> Grade:
    from services.reward.grading import gym

    gym.preload()
    return lambda sample: Graded(gym.grade_gym(_text(spec["input"], sample), sample.item, spec))


def _sum(spec: Mapping[str, Any]) -> Grade:
    parts = {name: build(part) for name, part in spec["graders"].items()}
    weights = {name: spec["weights"].get(name, 1.0) for name in parts}

    def grade(sample: Sample) -> Graded:
        rewards: dict[str, float] = {}
        terms = []
        for name, part in parts.items():
            try:
                graded = part(sample)
                reward = checked_reward(graded.reward, f"a {spec['graders'][name]['type']} grader")
            except GradingError as error:
                raise type(error)(f"{name}: {error}") from error
            rewards[name] = reward
            rewards.update({f"{name}/{inner}": r for inner, r in graded.parts.items()})
            terms.append(weights[name] * reward)
        return Graded(math.fsum(terms), rewards)

    return grade


def _value(template: str, sample: Sample) -> Any:
    try:
        return render(template, sample.completion, sample.item, sample.prompt)
    except TemplateError as error:
        raise BadInput(str(error)) from None


def _text(template: str, sample: Sample) -> str:
    value = _value(template, sample)
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{template} is {type(value).__name__}, not a text or a number")
    return repr(value)


BUILDERS: dict[str, Builder] = {
    "string_check": _string_check,
    "regex": _regex,
    "numeric": _numeric,
    "reasoning_gym": _reasoning_gym,
    "sum": _sum,
}
