"""The folder a run leaves behind: `<runs-dir>/<job_id>/`.

    job.yaml          the job as resolved, every default written out
    environment.json  versions, machine, seeds, hashes: enough to repeat the run
    metrics.jsonl     one row a step, and one a validation
    eval/             samples.jsonl, one row a held-out prompt and version
    samples.jsonl     one row a group: prompt, completions, rewards, versions
    groups.log        the groups as they were trained on, for `headway replay`
    checkpoints/      step-<n>/, complete ones only, the newest few
    model/            the trained model, a Hugging Face folder
    report.html       the curves
    learner.log       what the training processes said
    replays/          <name>/, a folder like this one for each replay

A line is appended by one write, so a reader sees whole lines. Steps count from
1 here: row `step` s was trained on weights of `version` s - 1 and made version s.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.errors import InvalidSpec, StorageFailed
from headway.finite import finite
from headway.jobs import check_job_id
from headway.jobspec import JobSpec
from headway.messages import Completion, Group
from headway.report_data import is_validation


class RunFolder:
    """Writes one run's folder. One process writes: rank 0 of the job's learner."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.groups = path / "groups.log"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.log = path / "learner.log"
        self.job = path / "job.yaml"
        self.environment = path / "environment.json"

    def create(self, spec: JobSpec) -> None:
        """Makes the folder and writes job.yaml; harmless when it is there already."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_whole(self.job, spec.to_yaml())

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Writes environment.json; what earlier starts of the job found stays in `earlier`."""
        earlier = self.starts()
        row = {**facts, "earlier": earlier} if earlier else dict(facts)
        write_whole(self.environment, json.dumps(finite(row), indent=2, ensure_ascii=False) + "\n")

    def starts(self) -> list[dict[str, Any]]:
        """What each start of the job found, oldest first.

        InvalidSpec when the file is not what was written.
        """
        if not self.environment.is_file():
            return []
        try:
            newest = json.loads(self.environment.read_text(encoding="utf-8"))
            starts = [dict(start) for start in (*newest.pop("earlier", []), newest)]
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidSpec(
                f"{self.environment} is damaged ({type(error).__name__}): bring it back, or remove"
                " it to go on without what earlier starts found"
            ) from None
        return starts

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Adds one step's row."""
        append_lines(self.metrics, [row])

    def append_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Adds the groups that step `step` trained on."""
        append_lines(self.samples, [sample_row(step, group) for group in groups])

    def truncate(self, step: int) -> None:
        """Drops rows of steps after `step`, which will be retraced, and a torn last line."""
        for path in (self.metrics, self.samples):
            keep_rows(path, step)


def run_path(runs_dir: Path, job_id: str) -> Path:
    """A job's folder. InvalidSpec when the id is not a plain name, before it becomes a path."""
    return runs_dir / check_job_id(job_id)


def sample_row(step: int, group: Group) -> dict[str, Any]:
    """One group as people and scripts read it."""
    return {
        "step": step,
        "ticket_id": group.ticket.ticket_id,
        "data_epoch": group.ticket.data_epoch,
        "node_id": group.node_id,
        "attempt": group.attempt,
        "start_version": group.start_version,
        "prompt": group.ticket.prompt,
        "item": dict(group.ticket.item),
        "completions": [_completion_row(c) for c in group.completions],
        **({"baseline": group.baseline.reward} if group.baseline is not None else {}),
    }


def _completion_row(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "reward": completion.reward,
        "parts": dict(completion.parts),
        "error_kind": completion.error_kind,
        "num_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "spans": [[s.version, s.start, s.end] for s in completion.spans],
    }


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows as JSON lines in one write, so that no reader sees half a line."""
    text = "".join(
        json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows
    )
    append_bytes(path, text.encode())


def append_bytes(path: Path, data: bytes) -> None:
    """Appends to a file, in one write where the system takes it whole. StorageFailed."""
    with _written(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(handle, rest) :]
        finally:
            os.close(handle)


def keep_rows(path: Path, last_step: int) -> None:
    """Keeps the rows with `step` at most `last_step`, and those of validations, which are done.

    The file is replaced whole.
    """
    if not path.is_file():
        return
    kept = []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                if line.endswith("\n") and (row["step"] <= last_step or is_validation(row)):
                    kept.append(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # torn by a crash, or no row of ours
    write_whole(path, "".join(kept))


def write_whole(path: Path, text: str) -> None:
    """Writes a file by a temporary name, flushed to disk, then renamed."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _written(path):
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)


def storage_failed(path: Path, why: object) -> StorageFailed:
    """The error of a write that failed, with the path and what is free there."""
    try:
        free = f"{shutil.disk_usage(path.parent).free >> 20} MiB are free there"
    except OSError:
        free = "its folder cannot be read"
    return StorageFailed(f"cannot write {path}: {why} ({free})")


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_failed(path, error.strerror or error) from error
