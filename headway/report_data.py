"""Reads a run folder for its report. A half-written or missing file is no error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SampleLine:
    """One completion as shown to people."""

    step: int
    prompt: str
    completion: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run folder holds, as far as it was written."""

    name: str
    job: Row
    environment: Row
    metrics: tuple[Row, ...]  # one a step, in order, the last writing of each, with its validation
    samples: tuple[Row, ...]
    num_samples: int  # rows in samples.jsonl

    def column(self, key: str) -> tuple[float | None, ...]:
        """One metric over the steps; None where a step lacks it or it is not finite."""
        return tuple(number_of(row.get(key)) for row in self.metrics)

    @property
    def steps(self) -> tuple[float, ...]:
        """The steps that have a row."""
        return tuple(float(row["step"]) for row in self.metrics)


def read_run(run_dir: Path) -> RunData:
    """Everything the report needs. FileNotFoundError when there is no such folder."""
    if not run_dir.is_dir():
        raise FileNotFoundError(run_dir)
    trained: dict[float, Row] = {}
    validated: dict[float, Row] = {}
    for row in json_lines(run_dir / "metrics.jsonl"):
        if (step := number_of(row.get("step"))) is not None:
            (validated if is_validation(row) else trained)[step] = row
    steps = trained.keys() | validated.keys()
    by_step = {step: {**validated.get(step, {}), **trained.get(step, {})} for step in steps}
    samples, count = _edges(json_lines(run_dir / "samples.jsonl"))
    return RunData(
        name=run_dir.resolve().name,
        job=_mapping(run_dir / "job.yaml"),
        environment=_mapping(run_dir / "environment.json"),
        metrics=tuple(by_step[step] for step in sorted(by_step)),
        samples=samples,
        num_samples=count,
    )


def is_validation(row: Row) -> bool:
    """Whether a row of metrics.jsonl is of a validation: of the version that `step` steps made.

    The row of a step has the version that the step began with, which is one less.
    """
    return row.get("step") is not None and row.get("step") == row.get("version")


def json_lines(path: Path) -> Iterator[Row]:
    """The JSON objects of a file; lines that are none (a cut last line) are passed over."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def number_of(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def sample_lines(rows: Sequence[Row], per_step: int) -> list[SampleLine]:
    """Completions of the first and of the last sampled step, `per_step` of each.

    The prompts that vary most in reward come first: they show what was learnt.
    """
    by_step: dict[int, list[Row]] = {}
    for row in rows:
        by_step.setdefault(int(number_of(row.get("step")) or 0), []).append(row)
    chosen = sorted(by_step)
    chosen = chosen[:1] + chosen[1:][-1:]
    lines: list[SampleLine] = []
    for step in chosen:
        found = [line for row in by_step[step] for line in _lines_of(step, row)]
        seen: dict[str, SampleLine] = {}
        for line in found:  # one a prompt first, then the rest
            seen.setdefault(line.prompt, line)
        first = list(seen.values())
        rest = [line for line in found if line not in first]
        lines += (first + rest)[:per_step]
    return lines


def _lines_of(step: int, row: Row) -> Iterator[SampleLine]:
    """Rows hold completions as objects (text, reward) or as texts beside a list of rewards."""
    prompt = plain_prompt(row.get("prompt"))
    completions = row.get("completions") or []
    rewards = row.get("rewards") or []
    for i, completion in enumerate(completions):
        if isinstance(completion, Mapping):
            text, reward = completion.get("text"), completion.get("reward")
        else:
            text, reward = completion, rewards[i] if i < len(rewards) else None
        yield SampleLine(step, prompt, str(text), number_of(reward))


def plain_prompt(prompt: object) -> str:
    """A prompt for people: the text itself, or the last user message of a chat."""
    if isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) for m in prompt):
        users = [m for m in prompt if m.get("role") == "user"] or prompt
        return str(users[-1].get("content", ""))
    return "" if prompt is None else str(prompt)


def _edges(rows: Iterator[Row], around: int = 64) -> tuple[tuple[Row, ...], int]:
    """The first and the last rows of a long file, and how many there are."""
    first: list[Row] = []
    last: list[Row] = []
    count = 0
    for row in rows:
        count += 1
        if len(first) < around:
            first.append(row)
            continue
        last.append(row)
        if len(last) > around:
            del last[0]
    return tuple(first + last), count


def _mapping(path: Path) -> Row:
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
