"""OpenAI's grader documents in our terms: `multi`, `score_model`, `label_model`, `python`.

`string_check` and `text_similarity` are the same in both. Keys of ours that a document may have
besides its own: `timeout_s`, and for the two that ask a model `endpoint` or `url`, `samples`,
`combine`, `try_timeout_s`, `patience_s` and `cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.errors import InvalidSpec
from headway.suggestions import near

ENDPOINT = "openai"
"""The endpoint of the service's settings that a document asks which names none."""

_OF_ALL = ("type", "name", "timeout_s")
_OF_JUDGES = ("endpoint", "url", "samples", "combine", "try_timeout_s", "patience_s", "cache")
_SAMPLING = {
    "temperature": "temperature", "seed": "seed", "max_completions_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens", "max_tokens": "max_tokens",
}  # fmt: skip
_MORE_SAMPLING = ("top_p", "reasoning_effort")


def translated(raw: Mapping[str, Any], path: str = "grader") -> Mapping[str, Any]:
    """The same grader in our terms; what is no document of OpenAI's stays as it is.

    Graders within it are not looked at. InvalidSpec names a key that is missing, unknown, or
    asks for what there is not (images, audio).
    """
    kind = raw.get("type")
    if kind == "python" and "image_tag" not in raw:
        return raw
    translate = _TRANSLATE.get(kind) if isinstance(kind, str) else None
    return raw if translate is None else translate(raw, path)


def _python(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """`image_tag` names OpenAI's set of packages; ours are those of the service."""
    rest = {key: value for key, value in raw.items() if key != "image_tag"}
    return {"call": "openai", "function": "grade"} | rest


def _multi(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    _check_keys(raw, path, ("graders", "calculate_output"), ())
    graders = raw["graders"]
    if isinstance(graders, list):
        if not all(isinstance(part, Mapping) and part.get("name") for part in graders):
            raise InvalidSpec(f"{path}.graders: in a list each grader has a name")
        graders = {part["name"]: part for part in graders}
    return {**_kept(raw), "type": "formula", "graders": graders, "formula": raw["calculate_output"]}


def _score_model(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    _check_keys(raw, path, ("input", "model"), ("range", "sampling_params", *_OF_JUDGES))
    chosen = raw.get("range") or [0, 1]
    if not isinstance(chosen, list) or len(chosen) != 2:
        raise InvalidSpec(f"{path}.range: a list of two numbers")
    wish = f"a number from {chosen[0]} to {chosen[1]}"
    return _judge(raw, path, wish) | {"range": chosen}


def _label_model(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    wanted = ("input", "model", "labels", "passing_labels")
    _check_keys(raw, path, wanted, ("sampling_params", *_OF_JUDGES))
    labels, passing = (_texts(raw[key], f"{path}.{key}") for key in wanted[2:])
    for label in passing:
        if label not in labels:
            raise InvalidSpec(f"{path}.passing_labels: {label!r} is none of labels")
    wish = f"one of {', '.join(labels)}"
    rewards = {label: float(label in passing) for label in labels}
    return _judge(raw, path, wish) | {"labels": rewards}


def _judge(raw: Mapping[str, Any], path: str, wish: str) -> dict[str, Any]:
    """A judge with the document's messages; the last one ends with what is wished for.

    OpenAI has the form of the answer from the request, so that documents do not ask for one.
    """
    judge = {**_kept(raw), **{key: raw[key] for key in _OF_JUDGES if key in raw}}
    if "url" not in judge:
        judge.setdefault("endpoint", ENDPOINT)
    messages = _messages(raw["input"], path)
    messages[-1]["content"] += f"\n\nEnd with a line of its own: Verdict: {wish}"
    judge |= {"type": "judge", "model": raw["model"], "messages": messages}
    judge |= {"temperature": None, "max_tokens": None}
    extra: dict[str, Any] = {}
    for key, value in _mapping(raw.get("sampling_params"), f"{path}.sampling_params").items():
        if key not in _SAMPLING and key not in _MORE_SAMPLING:
            known = (*_SAMPLING, *_MORE_SAMPLING)
            raise InvalidSpec(f"unknown key {path}.sampling_params.{key}{near(key, known)}")
        if value is not None:
            (judge if key in _SAMPLING else extra)[_SAMPLING.get(key, key)] = value
    return judge | ({"extra": extra} if extra else {})


def _messages(raw: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or not raw:
        raise InvalidSpec(f"{path}.input: a list of messages")
    messages = []
    for number, message in enumerate(raw):
        where = f"{path}.input.{number}"
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidSpec(f"{where}: a message has role and content")
        for key in message:
            if key not in ("role", "content", "type"):
                raise InvalidSpec(f"unknown key {where}.{key}")
        content = _content(message["content"], f"{where}.content")
        messages.append({"role": message["role"], "content": content})
    return messages


def _content(raw: Any, path: str) -> str:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, list):
        return "\n".join(_content(part, f"{path}.{i}") for i, part in enumerate(raw))
    kind = raw.get("type") if isinstance(raw, Mapping) else type(raw).__name__
    if kind not in ("input_text", "output_text", "text") or not isinstance(raw.get("text"), str):
        raise InvalidSpec(f"{path}: {kind} is not taken: a judge is sent texts")
    text: str = raw["text"]
    return text


def _check_keys(
    raw: Mapping[str, Any], path: str, wanted: Sequence[str], more: Sequence[str]
) -> None:
    known = (*_OF_ALL, *wanted, *more)
    for key in raw:
        if key not in known:
            raise InvalidSpec(f"unknown key {path}.{key}{near(str(key), known, path + '.')}")
    for key in wanted:
        if key not in raw:
            raise InvalidSpec(f"missing key {path}.{key}")


def _kept(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: raw[key] for key in _OF_ALL if key in raw}


def _texts(value: Any, path: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise InvalidSpec(f"{path}: a list of texts")
    return value


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidSpec(f"{path}: a JSON object")
    return value


_TRANSLATE: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "python": _python, "multi": _multi, "score_model": _score_model, "label_model": _label_model,
}  # fmt: skip
