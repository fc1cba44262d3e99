"""From what a user asks for to an eval job, with all that goes without saying."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from headway.data.source import open_source
from headway.errors import InvalidSpec
from headway.evaluation.request import Subject, held_out_of
from headway.evaluation.spec import EvalDataSpec
from headway.jobspec import JobSpec, parse_job, set_key
from headway.jobspec_errors import explain

_SAMPLING = ("n", "temperature", "top_p", "top_k")
_NOT_OURS = (*_SAMPLING, "snapshot_dir")  # keys of a run's `rollout` that say nothing here
_ON_THE_WAY = ("test_freq", "val_before_train")
_GSM8K = {"openai/gsm8k", "gsm8k"}
_MATH = {
    "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math",
    "math_dapo", "math500", "MATH-500",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked for; None where nothing is said."""

    job: JobSpec | None = None  # an eval job to take the rest from
    data: tuple[Mapping[str, Any], ...] = ()  # as in evaluation.data
    grader: Mapping[str, Any] | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    limit: int | None = None
    seed: int | None = None
    system_prompt: str | None = None
    overrides: tuple[tuple[str, Any], ...] = ()


def job_of(who: Subject, wishes: Wishes) -> JobSpec:
    """The eval job of a model or run.

    What is wished for comes first, then the job to take the rest from, then the run's own: its
    grader, its lengths, its held-out data. InvalidSpec when data or grader are still missing.
    """
    raw = _base(who, wishes)
    asked = raw.setdefault("evaluation", {})
    data = [dict(each) for each in wishes.data] or _data(who, wishes, asked)
    for each in data:
        _limit(each, wishes)
    asked["data"] = data
    for key in ("n", "temperature", "top_p", "max_tokens", "seed"):
        if (value := getattr(wishes, key)) is not None:
            asked[key] = value
    if asked.get("n", 1) > 1 and not asked.get("temperature") and wishes.temperature is None:
        asked["temperature"] = 1.0
    _grade(raw, wishes)
    for key, value in wishes.overrides:
        set_key(raw, key, value)
    return parse_job(raw)


def same_for(job: JobSpec, who: Subject) -> JobSpec:
    """The same evaluation of another model."""
    return job.model_copy(update={"model": job.model.model_copy(update={"path": who.path})})


def _base(who: Subject, wishes: Wishes) -> dict[str, Any]:
    """The job before any wish."""
    raw: dict[str, Any] = {"kind": "eval", "name": "eval", "model": {}}
    source = wishes.job or who.job
    if source is not None:
        whole = source.model_dump(mode="json")
        raw["model"] = {"max_model_len": source.model.max_model_len}
        rollout = whole["rollout"]
        raw["rollout"] = {key: rollout[key] for key in rollout if key not in _NOT_OURS}
        raw["reward"] = {
            key: whole["reward"][key] for key in ("grader", "timeout_s", "on_error", "max_rescores")
        }
        if source.kind == "eval":
            raw |= {"name": source.name, "seed": source.seed, "evaluation": whole["evaluation"]}
        elif source.evaluation.data and not wishes.data:  # as it was evaluated on its way
            asked = whole["evaluation"]
            raw["evaluation"] = {key: asked[key] for key in asked if key not in _ON_THE_WAY}
    raw["model"]["path"] = who.path
    return raw


def _data(who: Subject, wishes: Wishes, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    if asked.get("data"):
        return [dict(each) for each in asked["data"]]
    if who.job is not None:
        return held_out_of(who.job, wishes.limit)
    raise InvalidSpec(
        "say what to ask: --data with a file, a folder or a reasoning_gym name, or --job with an"
        " eval job"
    )


def _limit(data: dict[str, Any], wishes: Wishes) -> None:
    if wishes.limit is not None:
        data["limit"] = wishes.limit
        if data.get("source") == "reasoning_gym":
            data["size"] = wishes.limit
    if wishes.system_prompt is not None:
        data["system_prompt"] = wishes.system_prompt


def _grade(raw: dict[str, Any], wishes: Wishes) -> None:
    """Sets `reward.grader`, or a grader for each data set that says itself how it is graded."""
    reward = raw.setdefault("reward", {})
    if wishes.grader is not None:
        reward["grader"] = dict(wishes.grader)
        for each in raw["evaluation"]["data"]:
            each.pop("grader", None)
    elif "grader" not in reward:
        for each in raw["evaluation"]["data"]:
            if each.get("grader") is None:
                each["grader"] = default_grader(each, _rows(each))
        reward["grader"] = raw["evaluation"]["data"][0]["grader"]


def _rows(data: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The items of a data set whose grader is looked for; none where it needs no look."""
    if data.get("source") == "reasoning_gym":
        return ()
    try:
        spec = EvalDataSpec.model_validate(dict(data))
    except ValidationError as error:
        raise InvalidSpec("; ".join(explain(e, EvalDataSpec) for e in error.errors())) from None
    source = open_source(spec, "--data")
    rows = range(min(len(source), spec.limit or len(source)))
    return [source.row(index).item for index in rows]


def default_grader(data: Mapping[str, Any], items: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The grader of a data set that says itself how it is graded; InvalidSpec where none does.

    A reasoning_gym data set has its own. verl's rows do where in all of them `reward_model.style`
    is `rule`, there is a `ground_truth`, and `data_source` is a name of gsm8k, or one of MATH.
    """
    if data.get("source") == "reasoning_gym":
        return {"type": "reasoning_gym", "dataset": data["name"]}
    rows = list(items)
    sources = {str(item.get("data_source")) for item in rows}
    if rows and all(_by_rule(item) for item in rows):
        for kind, names in (("gsm8k", _GSM8K), ("math", _MATH)):
            if sources <= names:
                return {"type": kind, "reference": "{{item.reward_model.ground_truth}}"}
    raise InvalidSpec(
        f"{data.get('name')} does not say how it is graded: name a grader, such as --grader"
        ' \'{"type": "numeric", "reference": "{{item.answer}}"}\' (docs/graders.md)'
    )


def _by_rule(item: Mapping[str, Any]) -> bool:
    reward = item.get("reward_model")
    return (
        isinstance(reward, Mapping)
        and reward.get("style") == "rule"
        and isinstance(reward.get("ground_truth"), str)
    )
