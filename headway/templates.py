"""The templates of graders: `{{sample.output_text}}`, `{{item.answer}}`, `{{prompt}}`.

The names are those of OpenAI's graders. Standard library only: grader workers
import this, and start often.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_REFERENCE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_PATH = re.compile(r"(item|sample|prompt)((?:\.[^.\s{}]+)*)")


class TemplateError(ValueError):
    """A template is malformed, or names what is not there."""


def references(template: str) -> list[str]:
    """The dotted paths a template names. TemplateError for one that can never resolve."""
    paths = [match.group(1) for match in _REFERENCE.finditer(template)]
    for path in paths:
        if not _PATH.fullmatch(path) or (path.startswith("sample") and path != OUTPUT):
            raise TemplateError(
                f"{{{{{path}}}}} is not {{{{{OUTPUT}}}}}, {{{{item.<key>}}}} or {{{{prompt}}}}"
            )
    return paths


OUTPUT = "sample.output_text"


def lookup(path: str, completion: str, item: Mapping[str, Any], prompt: Any = None) -> Any:
    """What one dotted path stands for. TemplateError names the nearest key when it is missing."""
    if path == OUTPUT:
        return completion
    root, *rest = path.split(".")
    value: Any = prompt if root == "prompt" else item
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
        return lookup(whole.group(1), completion, item, prompt)

    def text(match: re.Match[str]) -> str:
        value = lookup(match.group(1), completion, item, prompt)
        return value if isinstance(value, str) else json.dumps(value)

    return _REFERENCE.sub(text, template)


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
