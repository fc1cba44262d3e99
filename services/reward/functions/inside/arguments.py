"""What each signature is given of a completion: verl's, TRL's, verifiers' and OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_loads = json.loads  # a function of the user's that replaces json's has no part in this
_ABSENT: Any = object()
_VERL = {
    "data_source": ("data_source", "metadata.source_dataset"),
    "ground_truth": ("reward_model.ground_truth", "ground_truth", "answer"),
    "extra_info": ("extra_info",),
}


class Sample:
    """A completion as the several signatures have it."""

    def __init__(self, completion: str, prompt: Any, item: Mapping[str, Any]) -> None:
        self.text, self.prompt, self.item = completion, prompt, item

    @property
    def chat(self) -> Any:
        """The completion as messages where the prompt is some, else its text."""
        if isinstance(self.prompt, list):
            return [{"role": "assistant", "content": self.text}]
        return self.text

    def first(self, name: str, *paths: str) -> dict[str, Any]:
        """The value of the first path that the item has, under the name; else nothing."""
        for path in paths:
            value: Any = self.item
            for key in path.split("."):
                value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
            if value is not _ABSENT:
                return {name: value}
        return {}


def of_verl(sample: Sample) -> dict[str, Any]:
    """The arguments of verl's compute_score."""
    given: dict[str, Any] = {"solution_str": sample.text, "extra_info": {}}
    for name, paths in _VERL.items():
        given |= sample.first(name, *paths)
    return given


def of_rubric(sample: Sample) -> dict[str, Any]:
    """What verifiers gives to a function of a Rubric."""
    info = sample.item.get("info", {})
    given = {
        "prompt": sample.prompt,
        "completion": sample.chat,
        "task": sample.item.get("task", "default"),
        "info": _loads(info) if isinstance(info, str) and info else info,
    }
    given |= sample.first("answer", "answer")
    return given | {"state": dict(given)}


def of_openai(sample: Sample) -> dict[str, Any]:
    """The two arguments of OpenAI's `grade`."""
    message = {"role": "assistant", "content": sample.text}
    output: dict[str, Any] = {
        "output_text": sample.text,
        "output_tools": [],
        "choices": [{"message": message}],
    }
    with suppress(ValueError, RecursionError):  # then there is none, as in OpenAI's graders
        output["output_json"] = _loads(sample.text)
    return {"sample": output, "item": dict(sample.item)}


def of_trl(samples: list[Sample]) -> dict[str, Any]:
    """Lists over the group: prompts, completions, and every column of the items."""
    columns = {key: None for sample in samples for key in sample.item}
    lists = {key: [sample.item.get(key) for sample in samples] for key in columns}
    return lists | {
        "prompts": [s.prompt for s in samples],
        "completions": [s.chat for s in samples],
    }


def as_lists(single: Callable[[Sample], dict[str, Any]], names: Mapping[str, str]) -> Any:
    """The same arguments as lists over the group, under other names."""

    def lists(samples: list[Sample]) -> dict[str, Any]:
        rows = [single(sample) for sample in samples]
        kept = {name: plural for name, plural in names.items() if all(name in r for r in rows)}
        return {plural: [row[name] for row in rows] for name, plural in kept.items()}

    return lists


SINGLE: dict[str, Callable[[Sample], dict[str, Any]]] = {
    "verl": of_verl, "rubric": of_rubric, "openai": of_openai,
}  # fmt: skip
WHOLE: dict[str, Callable[[list[Sample]], dict[str, Any]]] = {
    "trl": of_trl,
    "verl_batch": as_lists(
        of_verl,
        {"data_source": "data_sources", "solution_str": "solution_strs",
         "ground_truth": "ground_truths", "extra_info": "extra_infos"},
    ),
    "rubric_group": as_lists(
        of_rubric,
        {"prompt": "prompts", "completion": "completions", "answer": "answers", "state": "states",
         "task": "tasks", "info": "infos"},
    ),
}  # fmt: skip
