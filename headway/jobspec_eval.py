"""Eval jobs (`kind: eval`) as users write them: which keys they have, and what stands for the rest.

An eval job is a `JobSpec` whose sections of training hold their defaults and are never shown:
they are refused when written, and left out when the job is dumped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.jobspec import JobSpec

_SECTIONS = ("data", "algorithm", "actor", "critic", "trainer")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("lora_rank", "lora_alpha", "target_modules", "lora_dropout"),
    "reward": ("overlong_buffer",),
    "rollout": ("n", "temperature", "top_p", "top_k"),
    "evaluation": ("test_freq", "val_before_train"),
}
_INSTEAD = {
    "data": "evaluation.data",
    **{f"rollout.{key}": f"evaluation.{key}" for key in _KEYS["rollout"]},
}
_HIDDEN: Mapping[str, Any] = {
    "data": {"source": "jsonl", "name": ""},
    "trainer": {"total_training_steps": 1},
}


def completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """An eval job with all that a `JobSpec` needs. ValueError names the keys it may not have."""
    if found := list(_refused(raw)):
        named = [f"{key} (write {_INSTEAD[key]})" if key in _INSTEAD else key for key in found]
        raise ValueError(f"a job of kind eval trains nothing and has no {', '.join(named)}")
    return {**raw, **_HIDDEN}


def pruned(dumped: dict[str, Any]) -> dict[str, Any]:
    """A dumped eval job without what it may not have: it can be parsed again."""
    job = {name: value for name, value in dumped.items() if name not in _SECTIONS}
    for section, keys in _KEYS.items():
        if isinstance(job.get(section), dict):
            job[section] = {k: v for k, v in job[section].items() if k not in keys}
    return job


def check(job: JobSpec) -> None:
    """ValueError when a job's held-out data could not be sampled."""
    if job.kind == "eval" and not job.evaluation.data:
        raise ValueError("evaluation.data is empty: name the data sets to evaluate on")
    if job.evaluation.data and job.max_answer >= job.model.max_model_len:
        key = "evaluation" if job.evaluation.max_tokens else "rollout"
        raise ValueError(
            f"{key}.max_tokens {job.max_answer} leaves no token of model.max_model_len"
            f" {job.model.max_model_len} to a prompt"
        )


def last_validated(job: JobSpec, committed: int) -> list[int]:
    """The versions whose validation may be under way after so many steps: the last two due."""
    return [version for version in range(committed + 1) if job.validates(version)][-2:]


def _refused(raw: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in _SECTIONS if name in raw)
    for section, keys in _KEYS.items():
        written = raw.get(section)
        if isinstance(written, Mapping):
            yield from (f"{section}.{key}" for key in keys if key in written)
