"""The templates of graders: `{{sample.output_text}}`, `{{item.answer}}`, `{{prompt}}`.

The names are those of OpenAI's graders, `{{sample.output_json}}` and `{{sample.choices}}`
among them. Standard library only: grader workers import this, and start often.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_REFERENCE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_PATH = re.compile(r"(item|sample|prompt)((?:\.[^.\s{}]+)*)")
_INDEX = re.compile(r"\[(\d+)\]")
OUTPUT = "sample.output_text"
OUTPUT_JSON = "sample.output_json"
_CHOICES = "sample.choices"


class TemplateError(ValueError):
    """A template is malformed, or names what is not there."""


class NotInOutput(TemplateError):
    """The completion is no JSON, or has not what is named: the model's fault, not the item's."""


def references(template: str) -> list[str]:
    """The dotted paths a template names. TemplateError for one that can never resolve."""
    paths = [_dotted(match.group(1)) for match in _REFERENCE.finditer(template)]
    for path in paths:
        if not _PATH.fullmatch(path) or (path.startswith("sample") and not _of_sample(path)):
            raise TemplateError(
                f"{{{{{path}}}}} is not {{{{{OUTPUT}}}}}, {{{{{OUTPUT_JSON}}}}},"
                f" {{{{{_CHOICES}}}}}, {{{{item.<key>}}}} or {{{{prompt}}}}"
            )
    return paths


def lookup(path: str, completion: str, item: Mapping[str, Any], prompt: Any = None) -> Any:
    """What one dotted path stands for. TemplateError names the nearest key when it is missing."""
    if path == OUTPUT:
        return completion
    if path.startswith(OUTPUT_JSON):
        return _in_output(path, completion)
    root, *rest = path.split(".")
    value: Any = prompt if root == "prompt" else item
    if root == "sample":
        root, value, rest = _CHOICES, _choices(completion), rest[1:]
    seen = root
    for part in rest:
        value = _step(value, part, seen)
        seen = f"{seen}.{part}"
    return value


def render(template: str, completion: str, item: Mapping[str, Any], prompt: Any = None) -> Any:
    """A template with its values; one that is a single reference keeps the value's type.

    What a completion contains is never expanded again.
    """
    whole = _REFERENCE.fullmatch(template)
    if whole:
        return lookup(_dotted(whole.group(1)), completion, item, prompt)

    def text(match: re.Match[str]) -> str:
        value = lookup(_dotted(match.group(1)), completion, item, prompt)
        return value if isinstance(value, str) else json.dumps(value)

    return _REFERENCE.sub(text, template)


def _dotted(path: str) -> str:
    """`a[0].b` as `a.0.b`."""
    return _INDEX.sub(r".\1", path)


def _of_sample(path: str) -> bool:
    return path == OUTPUT or f"{path}.".startswith((f"{OUTPUT_JSON}.", f"{_CHOICES}."))


def _choices(completion: str) -> list[dict[str, Any]]:
    return [{"index": 0, "message": {"role": "assistant", "content": completion}}]


def _in_output(path: str, completion: str) -> Any:
    try:
        value = json.loads(completion)
    except (ValueError, RecursionError):
        raise NotInOutput("the completion is not JSON") from None
    seen = OUTPUT_JSON
    for part in path.removeprefix(OUTPUT_JSON).split(".")[1:]:
        try:
            value = _step(value, part, seen)
        except TemplateError as error:
            raise NotInOutput(str(error)) from None
        seen = f"{seen}.{part}"
    return value


def _step(value: Any, part: str, seen: str) -> Any:
    if isinstance(value, Mapping):
        if part in value:
            return value[part]
        near = difflib.get_close_matches(part, [str(key) for key in value], n=1)
        hint = f" (did you mean {seen}.{near[0]}?)" if near else _keys(value)
        raise TemplateError(f"{seen}.{part} does not exist{hint}")
    if isinstance(value, Sequence) and not isinstance(value, str) and part.isdecimal():
        if int(part) < len(value):
            return value[int(part)]
        raise TemplateError(f"{seen} has {len(value)} entries, none at {part}")
    raise TemplateError(f"{seen}.{part} does not exist: {seen} is {type(value).__name__}")


def _keys(value: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(str(key) for key in value)[:10])
    return f" (there are: {names})" if names else " (it is empty)"
