"""`reward_model` and `remote`: scores that somebody's server gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.reward.grading.asking import ask, value_of_answer
from services.reward.grading.judge import prose
from services.reward.grading.outcome import BadInput, Graded, OutsideFailed
from services.reward.grading.sample import Grade, Sample, text_of, value_of

_OVER_TOKENS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "min": min,
    "max": max,
    "product": math.prod,
}


def reward_model(spec: Mapping[str, Any]) -> Grade:
    """The classifier's score."""

    def grade(sample: Sample) -> Graded:
        (answer,) = ask(spec, sample, _input(spec, sample))
        try:
            return Graded(_score(value_of_answer(answer), spec))
        except (TypeError, ValueError, LookupError) as error:
            message = f"the reward model's answer has no score: {error}"
            raise OutsideFailed(message, "reward_model_unparsable") from None

    return grade


def remote(spec: Mapping[str, Any]) -> Grade:
    """The server's reward and parts."""

    def grade(sample: Sample) -> Graded:
        (answer,) = ask(spec, sample, _content(spec, sample))
        value = value_of_answer(answer)
        if not isinstance(value, Mapping):
            value = {"reward": value}
        if value.get("reward") is None:
            why = value.get("error") or "no reason was given"
            raise OutsideFailed(f"the server gave no reward: {why}", "remote_unscored")
        try:
            parts = {_part_name(n): _number(v) for n, v in (value.get("parts") or {}).items()}
            return Graded(_number(value["reward"]), parts)
        except (TypeError, ValueError, AttributeError) as error:
            message = f"the server's result is none: {error}"
            raise OutsideFailed(message, "remote_unparsable") from None

    return grade


def _input(spec: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    text = text_of(spec["input"], sample)
    if spec["api"] == "score":
        return {"text_1": prose(value_of(spec["query"], sample)), "text_2": text}
    if not spec["as_chat"]:
        return {"input": text}
    prompt = sample.prompt
    if prompt is None:
        raise BadInput("as_chat: the item has no prompt")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prose(prompt)}]
    return {"messages": [*messages, {"role": "assistant", "content": text}]}


def _score(value: Mapping[str, Any], spec: Mapping[str, Any]) -> float:
    if spec["api"] == "score":
        return _number(value["score"])
    scores = value["probs" if spec["api"] == "classify" else "data"]
    if isinstance(scores, list) and scores and isinstance(scores[0], list):
        return _OVER_TOKENS[spec["over_tokens"]]([_one(token, spec) for token in scores])
    return _one(scores, spec)


def _one(scores: Any, spec: Mapping[str, Any]) -> float:
    if not isinstance(scores, list):
        return _number(scores)
    if spec["label"] is not None:
        return _number(scores[spec["label"]])
    if len(scores) != 1:
        raise ValueError(f"there are {len(scores)}: say which with label")
    return _number(scores[0])


def _content(spec: Mapping[str, Any], sample: Sample) -> Any:
    if spec["body"] is not None:
        return _filled(spec["body"], sample)
    whole = {"completion": sample.completion, "item": dict(sample.item), "prompt": sample.prompt}
    return {name: whole[name] for name in spec["send"]}


def _filled(value: Any, sample: Sample) -> Any:
    if isinstance(value, str):
        return value_of(value, sample)
    if isinstance(value, Mapping):
        return {key: _filled(inner, sample) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, sample) for inner in value]
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:80]!r} is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{str(value)[:80]} is not finite")
    return number


def _part_name(name: str) -> str:
    if not name or not name.isprintable() or "/" in name or len(name) > 128:
        raise ValueError(f"{name[:80]!r} cannot be a part's name")
    return name
