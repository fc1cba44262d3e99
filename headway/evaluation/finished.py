"""A run folder's evaluation, read back: its settings, its tables, and `metrics.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.errors import NotFound
from headway.evaluation.metrics import Table, tables
from headway.evaluation.names import val_metrics
from headway.evaluation.records import PromptRecord, read_records, samples_path
from headway.evaluation.votes import Voter, voter
from headway.report_data import Row, read_run
from headway.whole_file import write_whole


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a run answered at one weight version, in tables."""

    run_dir: Path
    version: int
    job: Row  # as job.yaml has it
    environment: Row
    tables: tuple[Table, ...]

    @property
    def name(self) -> str:
        """For people: the run, and the version where that is a trained one."""
        return self.run_dir.name + (f", version {self.version}" if self.version else "")

    @property
    def model(self) -> str:
        """The job's model; of a training run its first."""
        model = self.job.get("model")
        return str(model.get("path", "")) if isinstance(model, Mapping) else ""

    @property
    def asked(self) -> Row:
        """The job's section `evaluation`."""
        section = self.job.get("evaluation")
        return section if isinstance(section, Mapping) else {}

    @property
    def pass_reward(self) -> float:
        """From which reward on a completion is right."""
        return _pass_reward(self.asked)

    def records(self) -> Iterator[PromptRecord]:
        """The prompts, as they were recorded."""
        return read_records(samples_path(self.run_dir), self.version)


def is_eval_job(run_dir: Path) -> bool:
    """Whether a run folder is of an eval job, which has recorded something."""
    return samples_path(run_dir).is_file() and read_run(run_dir).job.get("kind") == "eval"


def read_evaluation(run_dir: Path, version: int | None = None) -> Evaluation:
    """The evaluation of a version, by default the newest.

    NotFound when there is none, InvalidSpec when its records are damaged.
    """
    path = samples_path(run_dir)
    if not path.is_file():
        raise NotFound(f"{run_dir} holds no evaluation: there is no {path}")
    versions = sorted({record.version for record in read_records(path)})
    if not versions:
        raise NotFound(f"{path} holds no prompt: nothing was evaluated")
    chosen = versions[-1] if version is None else version
    if chosen not in versions:
        known = ", ".join(map(str, versions[:20]))
        raise NotFound(f"{run_dir} holds no evaluation of version {chosen} (there are: {known})")
    run = read_run(run_dir)
    asked = run.job.get("evaluation")
    return Evaluation(
        run_dir=run_dir,
        version=chosen,
        job=run.job,
        environment=run.environment,
        tables=tuple(
            tables(
                read_records(path, chosen),
                voter_of(run.job),
                _pass_reward(asked if isinstance(asked, Mapping) else {}),
            )
        ),
    )


def write_metrics(evaluation: Evaluation) -> Path:
    """Writes `metrics.json` beside the records and returns its path."""
    target = samples_path(evaluation.run_dir).with_name("metrics.json")
    content = {
        "model": evaluation.model,
        "version": evaluation.version,
        "evaluation": evaluation.asked,
        "metrics": val_metrics(evaluation.tables),
        "tables": [asdict(table) for table in evaluation.tables],
    }
    write_whole(target, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")
    return target


def voter_of(job: Row) -> Callable[[str], Voter | None]:
    """How answers of a data source are read: as its grader looks for them.

    None where data sets have graders that differ and rows name their tables themselves.
    """
    graders = graders_of(job)
    alike = len({json.dumps(grader, sort_keys=True) for grader in graders.values()}) == 1

    def find(source: str) -> Voter | None:
        grader = next(iter(graders.values())) if alike else graders.get(source)
        return voter(grader) if grader is not None else None

    return find


def graders_of(job: Row) -> dict[str, Mapping[str, Any]]:
    """The grader of each data set of an evaluation, by its table's name or its own."""
    reward, asked = job.get("reward"), job.get("evaluation")
    whole = reward.get("grader") if isinstance(reward, Mapping) else None
    data = asked.get("data") if isinstance(asked, Mapping) else None
    found: dict[str, Mapping[str, Any]] = {}
    for each in data if isinstance(data, list) else []:
        grader = each.get("grader") or whole
        if isinstance(grader, Mapping):
            found[str(each.get("data_source") or each.get("name"))] = grader
    return found


def _pass_reward(asked: Row) -> float:
    value = asked.get("pass_reward")
    return float(value) if isinstance(value, int | float) else 1.0


_ASKING = ("n", "temperature", "top_p", "top_k", "max_tokens", "pass_reward")


def differences(a: Evaluation, b: Evaluation) -> list[str]:
    """What else than the weights may make two evaluations differ: sampling and graders."""
    lines = [
        f"evaluation.{key}: {a.asked.get(key)} in A, {b.asked.get(key)} in B"
        for key in _ASKING
        if a.asked.get(key) != b.asked.get(key)
    ]
    one, other = graders_of(a.job), graders_of(b.job)
    lines += [
        f"the grader of {name}"
        for name in sorted(one.keys() & other.keys())
        if one[name] != other[name]
    ]
    return lines
