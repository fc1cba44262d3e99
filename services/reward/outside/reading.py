"""What travels for each kind of grader: the request's path and body, and the answer's core.

Pure functions over plain data. `content` is what a worker rendered; what the answer means is a
worker's business again (`services.reward.grading`), under its limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.outside.door import Failed

Spec = Mapping[str, Any]


def path_of(spec: Spec) -> str:
    """What a grader adds to its endpoint's base URL."""
    if spec["type"] == "judge":
        return "/chat/completions"
    return f"/{spec['api']}" if spec["type"] == "reward_model" else ""


def body_of(spec: Spec, model: str | None, contents: Sequence[Any], sample: int) -> Any:
    """The request's body: of one content, but for `remote`, which takes several."""
    if spec["type"] == "remote":
        return {"items": list(contents)} if spec["body"] is None else contents[0]
    body: dict[str, Any] = {"model": spec["model"] or model}
    if spec["type"] == "reward_model":
        return body | contents[0] | spec["extra"]
    body["messages"] = contents[0]
    for name in ("temperature", "max_tokens"):
        if spec[name] is not None:
            body[name] = spec[name]
    if spec["seed"] is not None:
        body["seed"] = spec["seed"] + sample
    return body | spec["extra"]


def answers_of(spec: Spec, answer: Any, num_contents: int) -> list[Any]:
    """What was answered, one value a content. Failed, to be tried again, where nothing was."""
    try:
        if spec["type"] == "judge":
            return [_said(answer["choices"][0])]
        if spec["type"] == "reward_model":
            (row,) = answer["data"]
            return [{key: row[key] for key in ("probs", "score", "data") if key in row}]
        if spec["body"] is not None:
            return [_at(answer, spec["field"])]
        results = answer["results"]
        if not isinstance(results, list) or len(results) != num_contents:
            raise ValueError
        return results
    except (LookupError, TypeError, ValueError):
        wanted = {
            "judge": "is no chat completion",
            "reward_model": f"is none of /{spec.get('api')}",
            "remote": f"has not {num_contents} results" if not spec.get("body") else "has no field",
        }[spec["type"]]
        raise Failed(f"answered with what {wanted}", "garbage", kind="unparsable") from None


def _said(choice: Any) -> dict[str, Any]:
    text = choice["message"]["content"]
    if text is not None and not isinstance(text, str):
        raise TypeError
    if not (text or "").strip():
        raise Failed("answered with an empty text", "empty", kind="unparsable")
    return {"text": text, "cut_off": choice.get("finish_reason") == "length"}


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value
